"""What models write in place into divided tensors: shared_memory.py follows it, and plain_effects.py tells which memory
a function shows and writes in the unmodified model."""

"""What a model takes and returns: the entries of a batch, and nested structures with tensors in them."""

"""What `plan: auto` means: the fastest plan that the planner finds among those that the executor can run."""

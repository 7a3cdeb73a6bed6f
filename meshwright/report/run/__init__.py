"""The page of a run, from what its folder records."""

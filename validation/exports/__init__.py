"""Trains exported plans with the programs that they were exported for."""

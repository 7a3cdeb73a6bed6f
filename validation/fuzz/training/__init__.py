"""Trains cases, in plain PyTorch and under their plans, and compares the results."""

"""Finds the model that is trained, and the names of its tensors."""

"""Matches the operations of all ranks by name, and runs them in one order."""

"""Constraints on plans: what of a search they change, and which of them contradict each other."""

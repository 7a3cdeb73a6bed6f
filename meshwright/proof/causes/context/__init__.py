"""Causes of plans with a context axis: mistakes that ranks can make with their parts of a sequence."""

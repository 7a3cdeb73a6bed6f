"""Causes of plans that divide tokens: mistakes of ranks with their parts of a sequence, or with rows for experts."""

"""The operators of which programs are made, by family."""

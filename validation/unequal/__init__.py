"""Measures what unequal shares gain if one of two ranks is half as fast."""

"""Numbers: their bounds, and their text with units."""

"""Pages of answers to questions about plans."""

"""Plain values as JSON, without pickles, in files and between ranks."""

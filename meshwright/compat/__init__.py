"""Meshwright inside of other training libraries. Each folder needs the library that it is named after."""

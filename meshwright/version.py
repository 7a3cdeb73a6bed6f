"""The version of this package, also where it is imported from a folder and not installed."""

VERSION = "0.1.0"

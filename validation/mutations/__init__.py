"""Changes one operator, constant, comparison, call or return value of the package at a time, and looks whether the
tests notice. README.md has the results."""

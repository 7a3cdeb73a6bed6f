"""The reference pages, made from the command line, the classes and the docstrings."""

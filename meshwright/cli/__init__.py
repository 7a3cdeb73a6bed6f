"""The command line. `commands` defines the commands and `main`, the entry point."""

from meshwright.cli.commands import app, main

__all__ = ["app", "main"]

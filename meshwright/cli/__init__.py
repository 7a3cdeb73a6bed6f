"""The command line; `commands` has it."""

from meshwright.cli.commands import app, main

__all__ = ["app", "main"]

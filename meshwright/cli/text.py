"""Prints text for people: lines that break between words on a terminal and stay whole in a pipe, and tables as wide as
the terminal."""

import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TextIO

from rich.console import Console

from meshwright.progress import NO_BREAK, wrapped

_WIDTH_OF_PIPES = 100  # of tables, unless COLUMNS says otherwise
_HEIGHT = 24


def width() -> int:
    """Returns the number of columns for tables: COLUMNS, or those of the terminal."""
    return max(20, shutil.get_terminal_size((_WIDTH_OF_PIPES, _HEIGHT)).columns)


def console() -> Console:
    """Returns the console for tables on stdout. It has colours on a terminal, unless NO_COLOR is set."""
    return Console(width=width())


def print_lines(lines: Iterable[str], file: TextIO | None = None, indent: int = 2) -> None:
    """Prints the lines, each as soon as it is there. On a terminal, long ones are wrapped, and what continues a line is
    indented by `indent`. Lines do not break at `NO_BREAK`, which is printed as a space."""
    stream = file or sys.stdout
    for line in lines:
        text = wrapped(line, width(), indent) if stream.isatty() else line
        print(text.replace(NO_BREAK, " "), file=stream, flush=True)


def print_columns(rows: Mapping[str, str]) -> None:
    """Prints a name and a text on each line. On a terminal, what continues a text is below it."""
    longest = max(map(len, rows))
    print_lines((f"{name:<{longest}}  {text}" for name, text in rows.items()), indent=longest + 2)


def print_message(text: str) -> None:
    """Prints a message to stderr."""
    print_lines([text], sys.stderr)

"""Reads files that somebody else may have written, or that a process was killed while it wrote: regular files only, up
to a size, and JSON whose numbers fit into those of a computer. What cannot be read raises a `ValueError` or an
`OSError`."""

import json
from pathlib import Path
from typing import Any

from meshwright.files.regular_file import open_regular_file

# What code raises that computes with values which no program of ours has written.
UNREADABLE = (ArithmeticError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
LARGEST_BYTES = 512 * 2**20
_MOST_DIGITS = 18  # of an integer; larger ones are no steps, bytes or times


def read_bytes(path: Path, most_bytes: int = LARGEST_BYTES, follow_link: bool = False) -> bytes:
    with open_regular_file(path, follow_link) as stream:
        content = stream.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise ValueError(f"it has more than {most_bytes:,} bytes")
    return content


def parse_json(text: str | bytes) -> Any:
    try:
        return json.loads(text, parse_int=_integer)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json(path: Path) -> Any:
    return parse_json(read_bytes(path))


def json_lines(text: str | bytes) -> list[dict[str, Any]]:
    """Returns the objects on the lines of a text. Lines that cannot be read are left out."""
    lines = (text if isinstance(text, bytes) else text.encode()).splitlines()
    try:
        values = parse_json(b"[" + b",".join(lines) + b"]")  # several times faster than line by line
    except ValueError:
        values = []
        for line in lines:
            try:
                values.append(parse_json(line))
            except ValueError:
                continue
    return [value for value in values if isinstance(value, dict)]


def describe_unreadable(error: BaseException) -> str:
    """Returns what is wrong with values whose use has raised one of `UNREADABLE`."""
    return f"it has no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__


def _integer(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)

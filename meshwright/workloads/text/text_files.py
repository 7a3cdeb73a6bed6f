"""Reads a folder of text files in pieces, so that memory stays small for files and lines of any length."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from meshwright.errors import InputError

DamagePolicy = Literal["fatal", "skip"]  # a job's data.damaged
PIECE_BYTES = 2**16


def text_files(folder: Path) -> list[Path]:
    """Returns all files below a folder except hidden ones, in an order that is the same on every machine."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder: name a folder of text files")
    relative = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    visible = sorted(file for file in relative if not any(part.startswith(".") for part in file.parts))
    if not visible:
        raise InputError(f"{folder}: there are no files in it: name a folder of text files")
    return [folder / file for file in visible]


def text_pieces(file: Path, damaged: DamagePolicy) -> Iterator[str]:
    """Yields the text of a file in pieces of whole lines. Only a line longer than a piece is cut.

    A line that is not UTF-8 is an error. If `damaged` is "skip", such lines are left out, and a warning names the first
    one.
    """
    lines: list[str] = []
    size, reported = 0, False
    for number, raw in _numbered_lines(file):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            if not reported:
                damage = f"{file}, line {number}: byte {error.start + 1} is not UTF-8"
                report_damage(damage, damaged, "convert the file to UTF-8")
            reported = True
            continue
        lines.append(text)
        size += len(raw)
        if size >= PIECE_BYTES:
            yield "".join(lines)
            lines, size = [], 0
    if lines:
        yield "".join(lines)


def report_damage(damage: str, damaged: DamagePolicy, remedy: str) -> None:
    """Raises an InputError that names the remedy, or only warns if `damaged` is "skip"."""
    if damaged == "fatal":
        raise InputError(f"{damage}: {remedy}, or skip damaged parts (damaged: skip)")
    warnings.warn(f"{damage}: it is skipped", stacklevel=3)


def _numbered_lines(file: Path) -> Iterator[tuple[int, bytes]]:
    """Yields pairs (line number, line). A line longer than a piece is yielded in several parts with the same number."""
    number = 1
    with file.open("rb") as stream:
        while raw := stream.readline(PIECE_BYTES):
            is_complete = raw.endswith(b"\n")
            if not is_complete and len(raw) == PIECE_BYTES:
                raw = _without_incomplete_character(stream, raw)
            yield number, raw
            number += is_complete


def _without_incomplete_character(stream: BinaryIO, raw: bytes) -> bytes:
    """Returns the bytes up to the last complete UTF-8 character, and moves the stream back to the bytes after it."""
    for back in range(1, 5):
        byte = raw[-back]
        if byte & 0xC0 == 0x80:  # not the first byte of a character
            continue
        character_bytes = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        if character_bytes > back:
            stream.seek(-back, 1)
            return raw[:-back]
        break
    return raw

"""A folder of text files, read piece by piece: however large a file is and wherever its lines end, memory is small."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Literal

from meshwright.errors import InputError

Damaged = Literal["fatal", "skip"]
PIECE_BYTES = 2**16


def text_files(folder: Path) -> list[Path]:
    """All files below it, hidden ones left out, in an order that is the same everywhere."""
    if not folder.is_dir():
        raise InputError(f"{folder}: there is no such folder: name a folder of text files")
    inside = (file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    found = sorted(file for file in inside if not any(part.startswith(".") for part in file.parts))
    if not found:
        raise InputError(f"{folder}: there are no files in it: name a folder of text files")
    return [folder / file for file in found]


def pieces(file: Path, damaged: Damaged) -> Iterator[str]:
    """The text in pieces of whole lines; only a line longer than a piece is cut. Lines that are no UTF-8 are fatal
    or left out; the first of a file is told with its number."""
    gathered: list[str] = []
    size, told = 0, False
    for number, raw in _lines(file):
        try:
            text = raw.decode()
        except UnicodeDecodeError as error:
            if not told:
                damage = f"{file}, line {number}: byte {error.start + 1} of it is no UTF-8"
                tell(damage, damaged, "convert the file to UTF-8")
            told = True
            continue
        gathered.append(text)
        size += len(raw)
        if size >= PIECE_BYTES:
            yield "".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield "".join(gathered)


def tell(damage: str, damaged: Damaged, remedy: str) -> None:
    """Damage is an error, or where the job says so a warning."""
    if damaged == "fatal":
        raise InputError(f"{damage}: {remedy}, or leave such parts out (damaged: skip)")
    warnings.warn(f"{damage}: it is left out", stacklevel=3)


def _lines(file: Path) -> Iterator[tuple[int, bytes]]:
    number = 1
    with file.open("rb") as opened:
        while raw := opened.readline(PIECE_BYTES):
            whole = raw.endswith(b"\n")
            if not whole and len(raw) == PIECE_BYTES:
                raw = _without_torn_character(opened, raw)
            yield number, raw
            number += whole


def _without_torn_character(opened: BinaryIO, raw: bytes) -> bytes:
    """A character of several bytes that a cut went through is left to the next piece."""
    for back in range(1, 5):
        lead = raw[-back]
        if lead & 0xC0 == 0x80:  # not a character's first byte
            continue
        wanted = 4 if lead >= 0xF0 else 3 if lead >= 0xE0 else 2 if lead >= 0xC0 else 1
        if wanted > back:
            opened.seek(-back, 1)
            return raw[:-back]
        break
    return raw

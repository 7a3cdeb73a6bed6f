"""JSON-lines files: one JSON object a line, found by where it begins, so that only the places of lines are in memory.

Every line is looked at once, when the file is first opened: what is damaged is told then, with its number. The places
of a large file's lines are kept in the cache folder, as long as the file stays the same.
"""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

import numpy as np

from meshwright.cache import cache_folder, made_once
from meshwright.errors import InputError
from meshwright.workloads.text.text_files import Damaged, tell

REMEDY = "correct the line"
PADDING = 0
LARGE_BYTES = 2**22  # from which on looking at every line takes noticeably long

Wrong = Callable[[dict[str, Any]], str | None]


class JsonLines(Sequence[dict[str, Any]]):
    """The objects of the good lines. `wrong` says of an object what is the matter with it, or nothing; `rule` names
    what it looks for, so that a file is looked at again under another one."""

    def __init__(self, path: Path, wrong: Wrong, rule: str, damaged: Damaged) -> None:
        self.path = path
        found = _kept(path, wrong, rule, damaged)
        if found.left_out:
            others = f" (and {found.left_out - 1} more)" if found.left_out > 1 else ""
            tell(f"{path}, {found.first}{others}", damaged, REMEDY)
        if not len(found.places):
            raise InputError(f"{path}: there is no good line in it")
        self._places = found.places
        self._file: BinaryIO | None = None
        self._opened_by = 0

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: Any) -> Any:
        if self._file is None or self._opened_by != os.getpid():
            # A forked worker shares the place that its parent reads at, and would move it.
            self._file, self._opened_by = self.path.open("rb"), os.getpid()
        self._file.seek(self._places[index])
        return json.loads(self._file.readline())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


@dataclass(frozen=True)
class _Index:
    """Where the good lines begin, how many are not good, and what is the matter with the first of these."""

    places: np.ndarray
    left_out: int
    first: str


def _kept(path: Path, wrong: Wrong, rule: str, damaged: Damaged) -> _Index:
    if not path.is_file():
        raise InputError(f"{path}: there is no such file: set data.root to the folder that has it")
    seen = path.stat()
    if seen.st_size < LARGE_BYTES:
        return _indexed(path, wrong, damaged)
    said = [str(path.resolve()), seen.st_size, seen.st_mtime_ns, rule, damaged]
    key = hashlib.blake2b(json.dumps(said).encode(), digest_size=16).hexdigest()

    def make(folder: Path) -> None:
        made = _indexed(path, wrong, damaged)
        np.save(folder / "places.npy", made.places)
        (folder / "left_out.json").write_text(json.dumps([made.left_out, made.first]))

    folder = made_once(cache_folder() / "lines" / key, make)
    return _Index(np.load(folder / "places.npy"), *json.loads((folder / "left_out.json").read_text()))


def _indexed(path: Path, wrong: Wrong, damaged: Damaged) -> _Index:
    places = array("q")
    place, left_out, first = 0, 0, ""
    with path.open("rb") as opened:
        for number, raw in enumerate(opened, 1):
            complaint = _complaint(raw, wrong) if raw.strip() else None
            if complaint is not None:
                left_out += 1
                first = first or f"line {number}: {complaint}"
                if damaged == "fatal":
                    break
            elif raw.strip():
                places.append(place)
            place += len(raw)
    return _Index(np.array(places, np.int64), left_out, first)


def _complaint(raw: bytes, wrong: Wrong) -> str | None:
    try:
        found = json.loads(raw)
    except ValueError as error:  # also what is no UTF-8
        return f"it is not JSON ({error})"
    if not isinstance(found, dict):
        return f"it is a {type(found).__name__}, not an object {{…}}"
    return wrong(found)


# ---- texts in them


def wrong_text(found: dict[str, Any], key: str, vocabulary: int) -> str | None:
    """What is the matter with the text or the list of token numbers that a line has under `key`."""
    value = found.get(key)
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        return f"'{key}' is neither a text nor a list of token numbers"
    wrong = next((token for token in value if not 0 < token < vocabulary), None)
    return None if wrong is None else f"'{key}' has token {wrong}, but tokens go from 1 to {vocabulary - 1}"


def token_numbers(value: str | list[int], vocabulary: int, length: int) -> np.ndarray:
    """The first `length` tokens, padded with 0. Of a text each word has a number made of its letters, so that no list
    of words is needed; with few numbers some words share one."""
    numbers = [hashed(word, vocabulary) for word in value.lower().split()] if isinstance(value, str) else value
    padded = np.full(length, PADDING, np.int64)
    padded[: min(length, len(numbers))] = numbers[:length]
    return padded


def hashed(word: str, vocabulary: int) -> int:
    """From 1 to `vocabulary` - 1, the same everywhere and always."""
    return 1 + crc32(word.encode()) % (vocabulary - 1)

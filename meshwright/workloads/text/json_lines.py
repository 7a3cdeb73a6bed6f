"""Random access to JSON-lines files (one JSON object per line). Only the byte offset of every line is held in memory.

Every line is checked when the file is opened, and a damaged line is reported with its number. The offsets of a large
file are stored in the cache folder, and read from there as long as the file does not change.
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

from meshwright.errors import InputError
from meshwright.files.cache import cache_folder, fill_once
from meshwright.workloads.text.text_files import DamagePolicy, report_damage

REMEDY = "correct the line"
PADDING = 0  # the token that fills a text up to its length
LARGE_BYTES = 2**22  # for files of this size and larger, checking every line takes noticeable time

FindProblem = Callable[[dict[str, Any]], str | None]  # returns what is wrong with an object; None if nothing is


class JsonLines(Sequence[dict[str, Any]]):
    """The objects of all lines in which `find_problem` finds no problem. `rule` is a text that identifies the rule that
    `find_problem` checks, because cached offsets of a file are valid for one rule only."""

    def __init__(self, path: Path, find_problem: FindProblem, rule: str, damaged: DamagePolicy) -> None:
        self.path = path
        index = _load_index(path, find_problem, rule, damaged)
        if index.damaged_lines:
            others = f" (and {index.damaged_lines - 1} more)" if index.damaged_lines > 1 else ""
            report_damage(f"{path}, {index.first_problem}{others}", damaged, REMEDY)
        if not len(index.offsets):
            raise InputError(f"{path}: there is no usable line in it: add lines")
        self._offsets = index.offsets
        self._file: BinaryIO | None = None
        self._opened_by = 0  # process id

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: Any) -> Any:
        if self._file is None or self._opened_by != os.getpid():
            # A forked worker shares its parent's file position and would move it.
            self._file, self._opened_by = self.path.open("rb"), os.getpid()
        self._file.seek(self._offsets[index])
        return json.loads(self._file.readline())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_file": None}


@dataclass(frozen=True)
class _LineIndex:
    """The byte offsets of a file's usable lines, the number of damaged lines, and the problem of the first damaged line
    (an empty string if there is none)."""

    offsets: np.ndarray
    damaged_lines: int
    first_problem: str


def _load_index(path: Path, find_problem: FindProblem, rule: str, damaged: DamagePolicy) -> _LineIndex:
    """Returns the index of a file, from the cache if the file is large and was read before."""
    if not path.is_file():
        raise InputError(f"{path}: there is no such file: set data.root to the folder that has it")
    state = path.stat()
    if state.st_size < LARGE_BYTES:
        return _build_index(path, find_problem, damaged)
    cache_key = [str(path.resolve()), state.st_size, state.st_mtime_ns, rule, damaged]
    name = hashlib.blake2b(json.dumps(cache_key).encode(), digest_size=16).hexdigest()

    def write(folder: Path) -> None:
        index = _build_index(path, find_problem, damaged)
        np.save(folder / "places.npy", index.offsets)
        (folder / "left_out.json").write_text(json.dumps([index.damaged_lines, index.first_problem]))

    folder = fill_once(cache_folder() / "lines" / name, write)
    return _LineIndex(np.load(folder / "places.npy"), *json.loads((folder / "left_out.json").read_text()))


def _build_index(path: Path, find_problem: FindProblem, damaged: DamagePolicy) -> _LineIndex:
    """Checks the lines of a file, and returns their index. If `damaged` is "fatal", it stops at the first damaged line.
    Empty lines are skipped."""
    offsets = array("q")
    offset, damaged_lines, first_problem = 0, 0, ""
    with path.open("rb") as stream:
        for number, raw in enumerate(stream, 1):
            problem = _line_problem(raw, find_problem) if raw.strip() else None
            if problem is not None:
                damaged_lines += 1
                first_problem = first_problem or f"line {number}: {problem}"
                if damaged == "fatal":
                    break
            elif raw.strip():
                offsets.append(offset)
            offset += len(raw)
    return _LineIndex(np.array(offsets, np.int64), damaged_lines, first_problem)


def _line_problem(raw: bytes, find_problem: FindProblem) -> str | None:
    try:
        value = json.loads(raw)
    except ValueError as error:  # bytes that are not UTF-8 raise it, too
        return f"it is not JSON ({error})"
    if not isinstance(value, dict):
        return f"it is a {type(value).__name__}, not an object {{…}}"
    return find_problem(value)


# ---- texts in the lines


def text_problem(line: dict[str, Any], key: str, vocabulary: int) -> str | None:
    """Returns what is wrong with the text or the list of token numbers that a line has under `key`; None if nothing
    is."""
    value = line.get(key)
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        return f"'{key}' is neither a text nor a list of token numbers"
    unknown = next((token for token in value if not 0 < token < vocabulary), None)
    return None if unknown is None else f"'{key}' has token {unknown}, but tokens go from 1 to {vocabulary - 1}"


def token_numbers(value: str | list[int], vocabulary: int, length: int) -> np.ndarray:
    """Returns the first `length` tokens of a text or of a list of token numbers, padded with 0. The words of a text are
    numbered by hashing. This needs no vocabulary file, but with a small vocabulary some words share a number."""
    numbers = [hash_word(word, vocabulary) for word in value.lower().split()] if isinstance(value, str) else value
    padded = np.full(length, PADDING, np.int64)
    padded[: min(length, len(numbers))] = numbers[:length]
    return padded


def hash_word(word: str, vocabulary: int) -> int:
    """Returns a token number from 1 to `vocabulary` - 1, the same for a word on every machine."""
    return 1 + crc32(word.encode()) % (vocabulary - 1)

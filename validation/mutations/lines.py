"""Which lines of a room each test runs, also in the processes that are forked for it.

Python 3.11 has no `sys.monitoring`, and coverage.py loses what processes have recorded that end by `os._exit`. Here
every process sets a byte of memory that all share: one for each test and line.
"""

import json
import mmap
import struct
import sys
import threading
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

_HEADER = struct.Struct("<q")


class LineRecord:
    def __init__(self, files: Sequence[Path], tests: int) -> None:
        self._offsets: dict[str, int] = {}
        count = 0
        for file in files:
            self._offsets[str(file)] = count
            count += len(file.read_text().splitlines()) + 1
        self._count = count
        self._starts = list(self._offsets.items())
        self._memory = mmap.mmap(-1, _HEADER.size + max(1, tests * count))

    def start(self) -> None:
        """Records from now on, in this thread, in new threads, and in processes that are forked from them."""
        threading.settrace(self._call)
        sys.settrace(self._call)

    def begin_test(self, number: int) -> None:
        _HEADER.pack_into(self._memory, 0, number)

    def lines_of(self, test: int, repository: Path) -> list[str]:
        """Returns "file:line" of each line that a test has run."""
        first = _HEADER.size + test * self._count
        row = self._memory[first : first + self._count]
        found, at = [], row.find(1)
        while at >= 0:
            name, offset = self._starts[bisect_right(self._starts, at, key=lambda start: start[1]) - 1]
            found.append(f"{Path(name).relative_to(repository)}:{at - offset}")
            at = row.find(1, at + 1)
        return found

    def _call(self, frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename not in self._offsets:
            return None
        return self._line(frame, event, value)

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        offset = self._offsets[frame.f_code.co_filename] + frame.f_lineno
        (test,) = _HEADER.unpack_from(self._memory)
        self._memory[_HEADER.size + test * self._count + offset] = 1
        return self._line


@dataclass
class Cover:
    """The tests of a room that passed, how long each took, and which of them run a line."""

    seconds: dict[str, float] = field(default_factory=dict)
    tests_of: dict[str, list[str]] = field(default_factory=dict)  # by "file:line"

    def tests_that_run(self, file: str, lines: tuple[int, int]) -> list[str]:
        """Returns those that run a line of a statement; those that run any line of its file if none does."""
        found = self._of(f"{file}:{line}" for line in range(lines[0], lines[1] + 1))
        return found or self._of(key for key in self.tests_of if key.startswith(f"{file}:"))

    def add(self, test: str, seconds: float, lines: Iterable[str]) -> None:
        self.seconds[test] = seconds
        for line in lines:
            self.tests_of.setdefault(line, []).append(test)

    def _of(self, keys: Iterable[str]) -> list[str]:
        names = dict.fromkeys(name for key in keys for name in self.tests_of.get(key, []))
        return [name for name in names if name in self.seconds]

    def cheapest_first(self, tests: Iterable[str], limit_s: float) -> list[str]:
        """Returns tests that take about `limit_s` in all: some of each file before the others, and those of one file
        together, which share what they have traced or started."""
        of_file: dict[str, list[str]] = {}
        for test in sorted(tests, key=lambda name: self.seconds[name]):
            of_file.setdefault(test.partition("::")[0], []).append(test)
        chosen: list[str] = []
        used_s = 0.0
        for first, last in ((0, _FIRST), (_FIRST, None)):
            for names in of_file.values():
                for name in names[first:last]:
                    if used_s + self.seconds[name] <= limit_s or not chosen:
                        chosen.append(name)
                        used_s += self.seconds[name]
        return chosen

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> "Cover":
        return cls(**json.loads(path.read_text()))


_FIRST = 4  # tests of each file that come before the others of any file

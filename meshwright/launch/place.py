"""`Place`: where a rank is, in a small mapped file that others can read even after the rank was killed."""

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

START_UP = "start-up"

# A sequence number stands before and behind the body: where they differ, a write was under way.
_NUMBER = struct.Struct("<Q")
_BODY = struct.Struct("<qqqq48s")  # pid, attempt, step, completed, doing
_WHOLE = struct.Struct("<Qqqqq48sQ")


@dataclass(frozen=True)
class Seen:
    """A rank's place as read from outside; `step` is -1 before the first step."""

    pid: int
    attempt: int
    step: int
    doing: str
    completed: int


class Place:
    """`at` is called several times a step, so it only packs a few bytes into memory."""

    def __init__(self, memory: mmap.mmap | bytearray, attempt: int) -> None:
        self.step = -1
        self.doing = START_UP
        self.completed = 0
        self.folder: Path | None = None
        self._attempt = attempt
        self._memory = memory
        self._pid = os.getpid()
        self._sequence = 0
        self._write()

    @classmethod
    def in_folder(cls, folder: Path, rank: int, attempt: int) -> "Place":
        place = cls.nowhere(attempt)
        place.move_to(folder, rank)
        return place

    @classmethod
    def nowhere(cls, attempt: int = 0) -> "Place":
        """A place that nobody else can read, for a world without a folder."""
        return cls(bytearray(_WHOLE.size), attempt)

    def move_to(self, folder: Path, rank: int) -> None:
        """From now on others can read it in this folder; torchrun's ranks agree on one only after they joined."""
        folder.mkdir(parents=True, exist_ok=True)
        with place_file(folder, rank).open("w+b") as file:
            file.truncate(_WHOLE.size)
            self._memory = mmap.mmap(file.fileno(), _WHOLE.size)
        self.folder = folder
        self._write()

    def at(self, step: int, doing: str) -> None:
        self.step = step
        self.doing = doing
        self._write()

    def finish_step(self) -> None:
        """One more step is completed in this attempt: from now on a failure is worth a restart."""
        self.completed += 1
        self._write()

    def _write(self) -> None:
        self._sequence += 1
        number = self._sequence
        _WHOLE.pack_into(
            self._memory,
            0,
            number,
            self._pid,
            self._attempt,
            self.step,
            self.completed,
            self.doing.encode(),
            number,
        )


def place_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.place"


def read_place(path: Path) -> Seen | None:
    """None where there is no place to read."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), _WHOLE.size, access=mmap.ACCESS_READ) as memory,
        ):
            for _ in range(100):
                # Back to front, the opposite of the writer: equal numbers mean that no write came between.
                (after,) = _NUMBER.unpack_from(memory, _NUMBER.size + _BODY.size)
                pid, attempt, step, completed, doing = _BODY.unpack_from(memory, _NUMBER.size)
                (before,) = _NUMBER.unpack_from(memory, 0)
                if before == after:
                    break
    except (OSError, ValueError):
        return None
    text = doing.rstrip(b"\0").decode(errors="ignore")
    return Seen(pid, attempt, step, text, completed) if before else None


def describe(step: int, doing: str) -> str:
    """` at step 57 (backward)`, or ` in start-up` before the first step."""
    if step < 0:
        return f" in {doing}" if doing else ""
    return f" at step {step} ({doing})" if doing else f" at step {step}"

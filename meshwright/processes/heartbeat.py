"""`Heartbeat`: which step a rank is at, what it is doing, and where it is if that takes long, in a small file. Other
processes can read the file even after the rank was killed."""

import mmap
import os
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from meshwright.files.regular_file import open_regular_file
from meshwright.files.storage import writing

START_UP = "start-up"
PREPARE = "prepare"  # the beginning of a step, so short that only listeners are told

# The same sequence number is written before and after the body. If a reader sees two numbers, it read during a write.
_NUMBER = struct.Struct("<Q")
_PLACE_BYTES = 200
_BODY = struct.Struct(f"<qqqq48s{_PLACE_BYTES}s")  # pid, attempt, step, completed, activity, place
_WHOLE = struct.Struct(f"<Qqqqq48s{_PLACE_BYTES}sQ")


@dataclass(frozen=True)
class HeartbeatRecord:
    """A rank's heartbeat as another process reads it. `step` is -1 before the first step, `activity` is a word such as
    `backward`, and `completed` is the number of steps completed in this attempt. `place` is the exchange that the rank
    waits in, or the function that it is in; empty if its activity has begun less than about a second ago."""

    pid: int
    attempt: int
    step: int
    activity: str
    completed: int
    place: str = ""


class ExchangeNames(Protocol):
    """Says in words what the ranks of a model exchange."""

    def waiting(self) -> str | None:
        """What this process is blocked in, or has failed in; None if it does not wait in an exchange of its own."""

    def name(self, operation: str, elements: int) -> str | None:
        """What a collective of torch with so many elements exchanges; None if the model does not know it."""


class HeartbeatListener(Protocol):
    """What is called in the rank's own process when its heartbeat changes."""

    def enter(self, step: int, activity: str) -> None: ...
    def finish_step(self) -> None: ...


class Heartbeat:
    """The heartbeat that a rank writes about itself. `update` is called several times a step, so it only writes a few
    bytes. It writes them through the system and not into mapped memory, where a disk that fails would kill the rank
    with SIGBUS. A heartbeat that cannot be written is left out."""

    def __init__(self, attempt: int) -> None:
        self.step = -1
        self.activity = START_UP
        self.completed = 0
        self.changes = 0  # counts all calls of `update`, `finish_step` and `go_on`
        self.device = "cpu"
        self.exchanges: ExchangeNames | None = None  # of the model that the rank trains, as soon as it has one
        # Returns the bytes in memory by kind, such as weights; None before the rank has a model.
        self.memory: Callable[[], Mapping[str, int]] | None = None
        self.folder: Path | None = None
        self.listeners: list[HeartbeatListener] = []
        self._attempt = attempt
        self._file: BinaryIO | None = None
        self._pid = os.getpid()
        self._sequence = 0
        self._place = b""

    @classmethod
    def in_folder(cls, folder: Path, rank: int, attempt: int) -> "Heartbeat":
        """Returns a heartbeat that is written to a file in this folder."""
        heartbeat = cls.in_memory(attempt)
        heartbeat.move_to(folder, rank)
        return heartbeat

    @classmethod
    def in_memory(cls, attempt: int = 0) -> "Heartbeat":
        """Returns a heartbeat that no other process can read, for ranks that have no folder."""
        return cls(attempt)

    def move_to(self, folder: Path, rank: int) -> None:
        """Writes the heartbeat to a file in this folder from now on. Ranks that torchrun has started need this, because
        they choose a folder only after they have joined the process group."""
        path = heartbeat_file(folder, rank)
        new = path.with_suffix(f".{os.getpid()}")
        # The file of a killed rank is replaced by a new one: if it were truncated, a process that has it mapped would
        # get SIGBUS. Writing the new file's bytes here reserves their space on the disk.
        with writing(folder):
            folder.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is not created again
            file = new.open("w+b", buffering=0)
            file.write(bytes(_WHOLE.size))
            new.replace(path)
        self._file = file
        self.folder = folder
        self._write()

    def update(self, step: int, activity: str) -> None:
        self.step = step
        self.activity = activity
        self.changes += 1
        self._place = b""
        if activity != PREPARE:
            self._write()
        for listener in self.listeners:
            listener.enter(step, activity)

    def finish_step(self) -> None:
        """Counts one more completed step of this attempt. Before the first one, an exception other than a communication
        error ends the run without a restart."""
        self.completed += 1
        self.changes += 1
        self._write()
        for listener in self.listeners:
            listener.finish_step()

    def go_on(self) -> None:
        """Notes that the rank makes progress within a long activity, such as an evaluation."""
        self.changes += 1

    def note_place(self, place: str) -> None:
        """Writes where the rank is. The watchdog calls this if the activity takes long."""
        encoded = place.encode()[:_PLACE_BYTES]
        if encoded != self._place:
            self._place = encoded
            self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        self._sequence += 1
        number = self._sequence
        activity = self.activity.encode()
        record = _WHOLE.pack(number, self._pid, self._attempt, self.step, self.completed, activity, self._place, number)
        with suppress(OSError):
            os.pwrite(self._file.fileno(), record, 0)


def heartbeat_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.heartbeat"


def read_heartbeat(path: Path) -> HeartbeatRecord | None:
    """Returns the latest heartbeat in the file; None if there is no file or nothing was written yet."""
    try:
        with (
            open_regular_file(path) as file,
            mmap.mmap(file.fileno(), _WHOLE.size, access=mmap.ACCESS_READ) as memory,
        ):
            for _ in range(100):
                # The writer writes front to back, and this reads back to front. Therefore, if both numbers are equal,
                # no write happened in between.
                (after,) = _NUMBER.unpack_from(memory, _NUMBER.size + _BODY.size)
                pid, attempt, step, completed, activity, place = _BODY.unpack_from(memory, _NUMBER.size)
                (before,) = _NUMBER.unpack_from(memory, 0)
                if before == after:
                    break
    except (OSError, ValueError):
        return None
    texts = [text.rstrip(b"\0").decode(errors="ignore") for text in (activity, place)]
    return HeartbeatRecord(pid, attempt, step, texts[0], completed, texts[1]) if before else None


def describe_progress(step: int, activity: str) -> str:
    """Returns the end of a sentence: ` at step 57 (backward)`, or ` in start-up` before the first step."""
    if step < 0:
        return f" in {activity}" if activity else ""
    return f" at step {step} ({activity})" if activity else f" at step {step}"

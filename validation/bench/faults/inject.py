"""Faults, written as sentences, for tests and for `validation.bench faults`:

    kill(rank=1).at(step=7).inject(run)
    kill(rank=0).during("save").inject(run)
    hang(rank=1).at(step=3).during("backward").inject(run)
    with slow(rank=1, factor=2).inject(run): ...
    corrupt(checkpoint)
    fill_disk(folder)

`inject` waits for the moment and does it. It acts from outside on the processes of the run, which cannot tell it from a
real fault.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from meshwright.processes.heartbeat import HeartbeatRecord
from meshwright.train.output.folder import RunFolder
from validation.bench.faults.moments import Moment

_SLICE_S = 0.02  # how long a slow rank runs at a time


@dataclass(frozen=True)
class Injection:
    """A fault that has happened: the heartbeat of the rank just before, and when it was (`time.time`). `end` undoes a
    fault that lasts; a killed rank stays dead."""

    seen: HeartbeatRecord
    time: float
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def pid(self) -> int:
        return self.seen.pid

    def end(self) -> None:
        self._stop.set()
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGCONT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


@dataclass(frozen=True)
class Fault:
    """Something that happens to a rank at a moment. `do` is called with the rank's process id, and with an event that
    is set when a fault that lasts has to end."""

    do: Callable[[int, threading.Event], None]
    moment: Moment

    def at(self, step: int) -> "Fault":
        """The fault happens when the rank is at this step or a later one."""
        return replace(self, moment=replace(self.moment, step=step))

    def during(self, part: str) -> "Fault":
        """The fault happens within this part of the run; `Moment.during` lists them."""
        return replace(self, moment=replace(self.moment, during=part))

    def by(self, step: int) -> "Fault":
        """The fault happens at this step at the latest, even if that is in another part of the run."""
        return replace(self, moment=replace(self.moment, latest=step))

    def after(self, restarts: int) -> "Fault":
        """The fault happens when the ranks were restarted at least so often."""
        return replace(self, moment=replace(self.moment, attempt=restarts))

    def inject(self, run: RunFolder, timeout_s: float = 120) -> Injection:
        """Waits for the moment, and lets the fault happen."""
        injection = self.inject_before_end(run, lambda: False, timeout_s)
        assert injection is not None
        return injection

    def inject_before_end(
        self, run: RunFolder, is_over: Callable[[], bool], timeout_s: float = 120
    ) -> Injection | None:
        """As `inject`, but returns None if `is_over` becomes true before the moment comes."""
        seen = self.moment.wait(run, timeout_s, is_over)
        if seen is None:
            return None
        injection = Injection(seen, time.time())
        self.do(seen.pid, injection._stop)
        return injection


def kill(rank: int, number: signal.Signals = signal.SIGKILL) -> Fault:
    """The rank gets a signal, by default the one that no process survives."""
    return Fault(lambda pid, _: os.kill(pid, number), Moment(rank))


def hang(rank: int) -> Fault:
    """The rank stands still, but its process and its connections stay, until the injection is ended."""
    return Fault(lambda pid, _: os.kill(pid, signal.SIGSTOP), Moment(rank))


def slow(rank: int, factor: float) -> Fault:
    """All that the rank computes takes `factor` times as long, until the injection is ended."""

    def begin(pid: int, end: threading.Event) -> None:
        threading.Thread(target=_slow_down, args=(pid, factor, end), daemon=True).start()

    return Fault(begin, Moment(rank))


def _slow_down(pid: int, factor: float, end: threading.Event) -> None:
    with suppress(ProcessLookupError):  # the rank has ended
        while not end.wait(_SLICE_S):
            os.kill(pid, signal.SIGSTOP)
            end.wait(_SLICE_S * (factor - 1))
            os.kill(pid, signal.SIGCONT)


def corrupt(checkpoint: Path) -> Path:
    """Changes one bit in the middle of the largest file of a checkpoint. Returns the file."""
    largest = max((path for path in checkpoint.iterdir() if path.is_file()), key=lambda path: path.stat().st_size)
    with largest.open("r+b") as file:
        file.seek(largest.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    return largest


def fill_disk(folder: Path, left_bytes: int = 0) -> Path:
    """Fills the disk of this folder, except for so many bytes, by a file that is returned. Whoever deletes it frees the
    disk again. Use it on a small disk of its own."""
    ballast = folder / "ballast"
    ballast.write_bytes(bytes(max(0, shutil.disk_usage(folder).free - left_bytes)))
    return ballast

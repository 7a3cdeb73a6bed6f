"""`Ending`: the end of a rank's loop, which the other ranks are told. At the end of the program, a rank waits for a
moment until the others have left their loops, too. If one of them waits for this one instead, the program ends with the
same line and a failure on both: what was trained is not what all batches would have trained.
"""

import atexit
import logging
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field

from meshwright.errors import CollectiveError
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.stall.departure import Departure, describe_departure
from meshwright.processes.stall.watchdog import Watchdog

_LEAST_WAIT_S = 10.0
_OUTSIDE_STEPS = ("evaluate", "weights", "save")  # what a rank does in other calls that all ranks must make
_STEPS_WAIT = 3  # as long as so many steps: the others may be about to begin one
_endings: "deque[Ending]" = deque(maxlen=8)  # of the sessions that were made last


@dataclass
class Progress:
    """How far the loop of a session is, which is still known when the session is gone. `error` is the one that ends the
    program, in words. `calls` is the number of methods of the session that run, each inside of the one before."""

    rank: int
    heartbeat: Heartbeat
    steps: int = 0
    error: str | None = None
    calls: int = 0
    _changes: int = 0
    _stepped_at: float = field(default_factory=time.monotonic)
    step_s: float = 0.0

    def note_steps(self, steps: int) -> None:
        now = time.monotonic()
        self.step_s, self._stepped_at, self.steps = now - self._stepped_at, now, steps

    def begin_call(self) -> None:
        """Notes that a method begins which all ranks call."""
        if not self.calls:
            self._changes = self.heartbeat.changes
        self.calls += 1

    def end_call(self) -> None:
        self.calls -= 1

    def describe(self, left: Departure) -> str:
        """Returns the line about a rank that has left, for this rank, which waits for it."""
        heartbeat = self.heartbeat
        is_in_step = heartbeat.step >= self.steps and not heartbeat.activity.startswith(_OUTSIDE_STEPS)
        return describe_departure(left, self.rank, self.steps, heartbeat.activity, is_in_step=is_in_step)

    def describe_wait(self, left: Departure) -> str | None:
        """Returns this line if this rank is in a call that the other one will not make; otherwise None."""
        is_in_call = self.calls > 0 and self.heartbeat.changes != self._changes
        return self.describe(left) if is_in_call and left.steps <= self.steps and left.error is None else None


class Ending:
    """The end of one session's loop."""

    def __init__(self, watchdog: Watchdog, progress: Progress) -> None:
        self._watchdog = watchdog
        self._progress = progress
        self._has_left = False
        watchdog.describe_wait = progress.describe_wait
        if not _endings:
            atexit.register(_end_together)
        _endings.append(self)

    def leave(self) -> None:
        """Tells the other ranks that this one has left its loop."""
        if not self._has_left:
            self._has_left = True
            self._watchdog.leave(self._progress.steps, self._progress.error)

    def await_others(self) -> str | None:
        """Waits for the other ranks. Returns the line of one that waits for this one; None if none does, or if the
        program ends with an error anyway."""
        if self._progress.error is not None:
            return None
        return self._watchdog.await_others(_LEAST_WAIT_S + _STEPS_WAIT * self._progress.step_s)


def _end_together() -> None:
    for ending in _endings:
        ending.leave()
    for ending in _endings:
        line = ending.await_others()
        if line is not None:
            print(f"{CollectiveError.__module__}.{CollectiveError.__name__}: {line}", file=sys.stderr)
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(1)  # nothing else changes the exit code of a program that ends

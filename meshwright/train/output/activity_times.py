"""Records what each rank of a run spends its time on, for the run's page: one file for each rank in the folder `times`
of the run, with one line for each window of steps, each checkpoint, each evaluation and each start.

    {"start": 1, "step": 40, "time": …, "pid": …, "host": …, "device": "cpu"}         a rank starts, or starts again
    {"step": 50, "steps": 10, "time": …, "seconds": {"forward": …, …}, "peak_bytes": …}    the steps up to step 50
    {"event": "save", "step": 50, "time": …, "seconds": 0.3}                         time is when it began

The seconds are those between the changes of the heartbeat's activity. The time in which a rank was blocked in exchanges
with other ranks is counted as `exchange` and not as the activity that it was blocked in. On a GPU, the activities are
times of the host, which runs ahead of the device; a step of every fifth window is timed on the device, too
(`device_seconds`).

Windows have at least 10 steps and become longer in long runs, so that the files stay small. All of it costs less than
10 µs a step.
"""

import itertools
import json
import os
import socket
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import torch

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.processes.world import World
from meshwright.train.output.peak_memory import peak_memory_bytes

SMALLEST_WINDOW = 10  # steps
WINDOWS_BEFORE_DOUBLING = 200
_WINDOWS_TIMED_ONCE = 5  # one step of so many windows is timed on a GPU, which costs it about 60 µs
_EVENTS = frozenset(("save", "evaluate", "evaluate (combining)", "load checkpoint"))
EXCHANGE = "exchange"


def times_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.jsonl"


class ActivityTimes:
    """Receives the changes of a heartbeat and writes the file of one rank. A file that cannot be written ends the
    recording, not the run."""

    def __init__(self, folder: Path, world: World, rank: int, window: int) -> None:
        self._device = world.device
        self._attempt = world.attempt
        self._base_window = window
        self._step = -1
        self._activity = ""
        self._since = time.perf_counter()
        self._blocked = WAIT_CLOCK.seconds
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._steps = 0
        self._windows = 0
        self._is_started = False
        self._events = _DeviceTimes() if world.device.type == "cuda" else None
        self._file: TextIO | None = None
        with suppress(OSError):
            folder.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is not created again
            self._file = times_file(folder, rank).open("a", buffering=1)

    def enter(self, step: int, activity: str) -> None:
        """Ends the current activity, and begins the next one."""
        now, blocked = time.perf_counter(), WAIT_CLOCK.seconds
        seconds, last = now - self._since, self._activity
        if last in _EVENTS:
            self._write({"event": last, "step": self._step, "time": time.time() - seconds, "seconds": seconds})
        elif (waited := blocked - self._blocked) > 0:
            self._seconds[last] += seconds - waited
            self._seconds[EXCHANGE] += waited
        else:
            self._seconds[last] += seconds
        self._step, self._activity, self._since, self._blocked = step, activity, now, blocked
        if self._events is not None and self._steps == 0 and self._windows % _WINDOWS_TIMED_ONCE == 0:
            self._events.mark(activity)

    def finish_step(self) -> None:
        """Counts a step, and writes a line at the end of a window."""
        if not self._is_started:  # the first step after a start is not like the others: allocations, compilation
            self._is_started = True
            self._write_start()
            self._seconds.clear()
            return
        self._steps += 1
        if (self._step + 1) % self._window_steps(self._step) == 0:
            self._end_window()

    def exclude(self, seconds: float) -> None:
        """Does not count the last `seconds`, in which the run itself was measured."""
        self._since += seconds

    def close(self) -> None:
        if self._file is not None:
            if self._steps:
                self._end_window()
            with suppress(OSError):
                self._file.close()

    def _window_steps(self, step: int) -> int:
        """The length of the window that holds this step: twice as long after each doubling of the run's length."""
        window = self._base_window
        while step >= window * WINDOWS_BEFORE_DOUBLING:
            window *= 2
        return window

    def _end_window(self) -> None:
        self.enter(self._step, self._activity)  # what has passed of the current activity belongs to this window
        line = {
            "step": self._step + 1,
            "steps": self._steps,
            "time": time.time(),
            "seconds": {name: round(seconds, 6) for name, seconds in self._seconds.items() if name},
            "peak_bytes": peak_memory_bytes(self._device),
        }
        if self._events is not None and (device_seconds := self._events.read()):
            line["device_seconds"] = device_seconds
        self._write(line)
        self._seconds.clear()
        self._steps = 0
        self._windows += 1

    def _write_start(self) -> None:
        name = torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else self._device.type
        start = {"start": self._attempt, "step": self._step, "time": time.time(), "pid": os.getpid()}
        self._write({**start, "host": socket.gethostname(), "device": name})

    def _write(self, line: dict[str, object]) -> None:
        if self._file is None:
            return
        try:
            self._file.write(json.dumps(line) + "\n")
        except (OSError, ValueError):  # a full disk, or a file that was closed after one
            self._file = None


class _DeviceTimes:
    """Times the activities of one step of each window on a GPU by CUDA events, which are read a window later."""

    def __init__(self) -> None:
        self._marks: list[tuple[str, torch.cuda.Event]] = []
        self._last_marks: list[tuple[str, torch.cuda.Event]] = []

    def mark(self, activity: str) -> None:
        if torch.cuda.is_current_stream_capturing() or len(self._marks) > 64:
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append((activity, event))

    def read(self) -> dict[str, float]:
        """Returns the seconds of the step of the window before, by activity; empty if the device is not that far."""
        marks, self._last_marks, self._marks = self._last_marks, self._marks, []
        if len(marks) < 2 or not marks[-1][1].query():
            return {}
        seconds: dict[str, float] = {}
        for (activity, begin), (_, end) in itertools.pairwise(marks):
            seconds[activity] = seconds.get(activity, 0.0) + begin.elapsed_time(end) / 1e3
        return {name: round(value, 6) for name, value in seconds.items()}

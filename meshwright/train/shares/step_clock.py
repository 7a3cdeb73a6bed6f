"""Measures how fast a rank computes its samples, without the time in which it waits for other ranks.

A CPU rank is measured by the host: the time of its steps and of loading their batches, less the time in which it was
blocked in exchanges (`collectives/wait_clock.py`). On a GPU, the host runs ahead of the device, and gradients are
exchanged while the device computes. There the forward pass of a step's first microbatch is timed on the device, because
replicas exchange nothing in it."""

import time
from statistics import median
from typing import Protocol

import torch

from meshwright.collectives.wait_clock import WAIT_CLOCK


class StepClock(Protocol):
    """`begin` and `end` are called before and after each step, `mark` when its activity changes."""

    def loaded(self, seconds: float) -> None:
        """Adds the time in which the batch of the next step was loaded."""

    def begin(self) -> None: ...

    def mark(self, activity: str) -> None: ...

    def end(self, samples: int, first_samples: int, counts: bool) -> None:
        """`samples` are those of this rank in the step, and `first_samples` those of its first microbatch. A step that
        does not count is not measured."""

    def take_speed(self) -> float:
        """Returns the median of the samples/s of the steps since the last call; 0 if none had samples."""


class HostClock:
    def __init__(self) -> None:
        self._loading_s = self._began = self._blocked = 0.0
        self._speeds: list[float] = []

    def loaded(self, seconds: float) -> None:
        self._loading_s += seconds

    def begin(self) -> None:
        self._began, self._blocked = time.perf_counter(), WAIT_CLOCK.seconds

    def mark(self, activity: str) -> None:
        pass

    def end(self, samples: int, first_samples: int, counts: bool) -> None:
        seconds = time.perf_counter() - self._began - (WAIT_CLOCK.seconds - self._blocked) + self._loading_s
        self._loading_s = 0.0
        if counts and samples and seconds > 0:
            self._speeds.append(samples / seconds)

    def take_speed(self) -> float:
        speeds, self._speeds = self._speeds, []
        return median(speeds) if speeds else 0.0


class DeviceClock:
    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []  # of this step: the begin and the end of its first forward pass
        self._timed: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []

    def loaded(self, seconds: float) -> None:
        pass

    def begin(self) -> None:
        self._events = []

    def mark(self, activity: str) -> None:
        if activity == ("forward", "backward", None)[len(self._events)]:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)

    def end(self, samples: int, first_samples: int, counts: bool) -> None:
        if counts and first_samples and len(self._events) == 2:
            self._timed.append((first_samples, self._events[0], self._events[1]))

    def take_speed(self) -> float:
        timed, self._timed = self._timed, []
        if not timed:
            return 0.0
        timed[-1][2].synchronize()
        return median(samples / max(1e-9, begin.elapsed_time(end) / 1e3) for samples, begin, end in timed)

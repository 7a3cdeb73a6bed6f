"""Measures the speed of training: the time of steps, without evaluations, checkpoints and the warm-up of the first
step."""

import time
from collections.abc import Iterable, Iterator
from statistics import median
from typing import TypeVar

Item = TypeVar("Item")
_TOLD_SHARE = 0.1


class ThroughputMeter:
    """Measures seconds and samples in windows of several steps. Call `end_window` after reading the loss: reading it
    waits for the device, so that the window's time includes all work of its steps."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples = 0
        self._steps = 0
        self._waited_s = 0.0
        self._windows: list[tuple[float, int, int]] = []  # seconds, steps, samples
        self._waited_in_windows_s = 0.0

    def step(self, samples: int) -> None:
        """Counts a step whose work was submitted to the device. The first step after the start or a pause is not
        measured."""
        if self._began is None:  # the first step after the start or a pause is not timed: allocations, loader start-up
            self._began = time.perf_counter()
            self._waited_s = 0.0
            return
        self._samples += samples
        self._steps += 1

    def waiting(self, batches: Iterable[Item]) -> Iterator[Item]:
        """Yields the batches, and measures how long each one is waited for."""
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            self._waited_s += time.perf_counter() - began
            yield batch

    def end_window(self) -> float | None:
        """Ends a window, and returns its samples per second; None if it has no steps."""
        if self._began is None or not self._steps:
            return None
        now = time.perf_counter()
        window = (now - self._began, self._steps, self._samples)
        self._windows.append(window)
        self._waited_in_windows_s += self._waited_s
        self._began, self._steps, self._samples, self._waited_s = now, 0, 0, 0.0
        return window[2] / window[0]

    def pause(self) -> None:
        """Ends the window, and stops measuring until the next step. Call it before evaluations and checkpoints."""
        self.end_window()
        self._began = None
        self._steps = self._samples = 0

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over all windows; None if there are no windows."""
        seconds = sum(window[0] for window in self._windows)
        return sum(window[2] for window in self._windows) / seconds if seconds else None

    @property
    def loader_share(self) -> float | None:
        """The share of the time of all windows in which the rank waited for its data loader; None without windows."""
        seconds = sum(window[0] for window in self._windows)
        return self._waited_in_windows_s / seconds if seconds else None

    @property
    def step_s(self) -> float | None:
        """The median over all windows of the seconds per step; None if there are no windows."""
        return median(seconds / steps for seconds, steps, _ in self._windows) if self._windows else None


def describe_wait(share: float | None, workers: int) -> str | None:
    """Returns a line for users whose run has waited for its data in this share of the time; None if it is small."""
    if share is None or share < _TOLD_SHARE:
        return None
    return (
        f"{share:.0%} of the training time was spent waiting for data: raise data.workers (now {workers}), or make the"
        " data set faster"
    )

"""Measures the speed of training: the time of steps, without evaluations, checkpoints and the warm-up of the first
step."""

import time
from statistics import median


class ThroughputMeter:
    """Measures in windows of several steps. A window ends when the loss is read: that waits for the device, so the
    window's time includes all its work."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples = 0
        self._steps = 0
        self._windows: list[tuple[float, int, int]] = []  # seconds, steps, samples

    def step(self, samples: int) -> None:
        """Counts a step whose work was submitted to the device."""
        if self._began is None:  # the first step after the start or a pause is not timed: allocations, loader start-up
            self._began = time.perf_counter()
            return
        self._samples += samples
        self._steps += 1

    def end_window(self) -> float | None:
        """Ends a window, and returns its samples per second; None when it has no steps."""
        if self._began is None or not self._steps:
            return None
        now = time.perf_counter()
        window = (now - self._began, self._steps, self._samples)
        self._windows.append(window)
        self._began, self._steps, self._samples = now, 0, 0
        return window[2] / window[0]

    def pause(self) -> None:
        """Stops measuring until the next step, because something else than training follows."""
        self.end_window()
        self._began = None
        self._steps = self._samples = 0

    @property
    def samples_per_s(self) -> float | None:
        """Samples per second over all windows; None when there is none."""
        seconds = sum(window[0] for window in self._windows)
        return sum(window[2] for window in self._windows) / seconds if seconds else None

    @property
    def step_s(self) -> float | None:
        """Median time of a step over all windows; None when there is none."""
        return median(seconds / steps for seconds, steps, _ in self._windows) if self._windows else None

"""How fast training goes: time spent in steps, without evaluations, checkpoints and the first step's warm-up."""

import time
from statistics import median


class Meter:
    """Windows end where the loss is read, which waits for the device, so a window's time is true there."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._samples = 0
        self._steps = 0
        self._windows: list[tuple[float, int, int]] = []  # seconds, steps, samples

    def step(self, samples: int) -> None:
        """A step was handed to the device."""
        if self._began is None:  # the first step after the start or a pause: allocations, loader start-up
            self._began = time.perf_counter()
            return
        self._samples += samples
        self._steps += 1

    def read(self) -> float | None:
        """Ends a window; returns its samples per second."""
        if self._began is None or not self._steps:
            return None
        now = time.perf_counter()
        window = (now - self._began, self._steps, self._samples)
        self._windows.append(window)
        self._began, self._steps, self._samples = now, 0, 0
        return window[2] / window[0]

    def pause(self) -> None:
        """What comes next is not training; the step after it starts the clock again."""
        self.read()
        self._began = None
        self._steps = self._samples = 0

    @property
    def samples_per_s(self) -> float | None:
        seconds = sum(window[0] for window in self._windows)
        return sum(window[2] for window in self._windows) / seconds if seconds else None

    @property
    def step_s(self) -> float | None:
        return median(seconds / steps for seconds, steps, _ in self._windows) if self._windows else None

"""`SpikeDetector`: finds steps whose loss is far above those of the steps before (`train.on_spike`).

With m the median of the last losses, and s their standard deviation as the median absolute deviation gives it for a
normal distribution (`_deviation`), a loss x is a spike if

    x > m + deviations × s

Neither m nor s is moved by the few spikes among many losses. The losses are the means over the global batch, which are
equal on all ranks, so all ranks decide the same.
"""

import math
from collections import deque
from collections.abc import Sequence
from statistics import median

from meshwright.user.job_sections import SpikeSettings

_FEWEST_LOSSES = 10  # with fewer, nothing is a spike
_NORMAL = 1.4826  # the standard deviation of a normal distribution, divided by its median absolute deviation


class SpikeDetector:
    """Remembers the losses of the last steps that were no spikes and were finite."""

    def __init__(self, settings: SpikeSettings) -> None:
        self._deviations = settings.deviations
        self._losses: deque[float] = deque(maxlen=settings.window)

    def examine(self, loss: float) -> str | None:
        """Takes the loss of a step. Returns in words why it is a spike, or None if it is none."""
        if not math.isfinite(loss):
            return None
        if len(self._losses) >= min(_FEWEST_LOSSES, self._losses.maxlen or 0):
            middle = median(self._losses)
            deviation = _deviation(self._losses, middle)
            if loss > middle + self._deviations * deviation:
                return (
                    f"the loss is {loss:.4g}, more than {self._deviations:g} deviations of {deviation:.3g} above"
                    f" {middle:.4g}, the median of the last {len(self._losses)} steps"
                )
        self._losses.append(loss)
        return None

    @property
    def losses(self) -> list[float]:
        """The losses that are remembered, for a checkpoint: a run that is resumed decides as the saved one would."""
        return list(self._losses)

    def restore(self, losses: Sequence[float]) -> None:
        self._losses.clear()
        self._losses.extend(losses)


def _deviation(losses: Sequence[float] | deque[float], middle: float) -> float:
    return _NORMAL * median(abs(loss - middle) for loss in losses)

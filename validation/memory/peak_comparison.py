"""Predicted beside measured bytes: the table that the benchmarks of memory print, and its last line."""

from dataclasses import dataclass
from statistics import median

_GIB = 2**30


@dataclass(frozen=True)
class PeakComparison:
    name: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def line(one: PeakComparison) -> str:
    sizes = f"{one.predicted_bytes / _GIB:9.3f} GiB{one.measured_bytes / _GIB:11.3f} GiB"
    return f"{one.name:44}{sizes}{one.error:9.1%}"


def head() -> str:
    return f"{'':44}{'predicted':>13}{'measured':>15}{'error':>9}"


def summary(found: list[PeakComparison]) -> str:
    errors = sorted(abs(one.error) for one in found)
    return f"{len(errors)} rows: median error {median(errors):.1%}, worst {errors[-1]:.1%}"

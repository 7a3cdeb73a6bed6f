"""Predicted and measured peaks of memory, and the table that the commands of this folder print from them."""

from dataclasses import dataclass
from statistics import median

_GIB = 2**30


@dataclass(frozen=True)
class PeakComparison:
    """The predicted and the measured peak of one training step."""

    name: str
    predicted_bytes: float
    measured_bytes: float

    @property
    def error(self) -> float:
        """The relative error; positive if more was predicted than measured."""
        return self.predicted_bytes / self.measured_bytes - 1


def table_line(comparison: PeakComparison) -> str:
    sizes = f"{comparison.predicted_bytes / _GIB:9.3f} GiB{comparison.measured_bytes / _GIB:11.3f} GiB"
    return f"{comparison.name:44}{sizes}{comparison.error:9.1%}"


def table_head() -> str:
    return f"{'':44}{'predicted':>13}{'measured':>15}{'error':>9}"


def summary(comparisons: list[PeakComparison]) -> str:
    """The last line of the table: the median and the largest error."""
    errors = sorted(abs(comparison.error) for comparison in comparisons)
    return f"{len(errors)} rows: median error {median(errors):.1%}, worst {errors[-1]:.1%}"

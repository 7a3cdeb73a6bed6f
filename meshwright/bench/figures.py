"""The derived figures of benchmarks, defined once.

    speed-up              = seconds of a step on one device / seconds of a step                    speedup
    efficiency            = speed-up / devices                                                     efficiency
    mixed-precision gain  = fp32 seconds / seconds in the other precision, of the same strategy    precision_gains
    automatic over manual = samples/s of `auto` / those of the fastest strategy chosen by hand     automatic_over_manual

All steps train the same global batch, so that ratios of seconds are ratios of samples per second.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

REFERENCE_PRECISION = "fp32"


@dataclass(frozen=True)
class SpeedFigure:
    """What the derived figures are computed from: a strategy, its devices and precision, and the seconds of a step."""

    strategy: str
    ranks: int
    precision: str
    step_s: float


def speedup(one_device_s: float, step_s: float) -> float:
    return one_device_s / step_s


def efficiency(speedup: float, ranks: int) -> float:
    return speedup / ranks


def spread(values: Sequence[float]) -> float:
    """Returns (highest - lowest) / median."""
    return (max(values) - min(values)) / median(values)


def precision_gains(figures: Sequence[SpeedFigure]) -> dict[str, float]:
    """Returns, for each other precision than fp32, the median gain over the strategies that were run in both."""
    reference = {(f.strategy, f.ranks): f.step_s for f in figures if f.precision == REFERENCE_PRECISION}
    gains: dict[str, list[float]] = {}
    for figure in figures:
        key = (figure.strategy, figure.ranks)
        if figure.precision != REFERENCE_PRECISION and key in reference:
            gains.setdefault(figure.precision, []).append(reference[key] / figure.step_s)
    return {precision: median(values) for precision, values in gains.items()}


def automatic_over_manual(
    figures: Sequence[SpeedFigure], automatic: str, not_chosen: Sequence[str] = ()
) -> Mapping[int, float]:
    """Returns, by number of ranks, how much faster the automatic plan is than the fastest other strategy on as many
    devices, in any precision that was run. `not_chosen` are strategies that nobody would choose, such as references."""
    ratios: dict[int, float] = {}
    for figure in figures:
        if figure.strategy == automatic:
            manual = [
                other.step_s
                for other in figures
                if other.ranks == figure.ranks and other.strategy not in (automatic, *not_chosen)
            ]
            if manual:
                ratios[figure.ranks] = min(manual) / figure.step_s
    return ratios

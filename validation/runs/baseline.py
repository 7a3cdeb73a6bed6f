"""The guess to beat: every GPU of a kind computes at a constant share of its peak, whatever it computes.

    step  = FLOPs / (ranks · share · peak)                                                    `guess`
    share = median over calibration rows of FLOPs / (ranks · seconds · peak)                  `Point.share`

FLOPs are those of a step with what is computed again, so the guess knows recomputation. A source is guessed from the
others that are not its kin, from the first of these sets that has rows: `plain` the same GPU and precision, then all;
`alike` the same GPU, precision and kind of model, then `plain`'s, every source with one voice however many rows it has.
`own` is the same source, GPU and precision: better than anyone could know.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from validation.runs.case import Case
from validation.runs.kin import kin_of
from validation.runs.reading.flops import step_flops
from validation.runs.reading.hardware import device_of

Guess = Literal["plain", "alike", "own"]
Key = tuple[str, ...]


@dataclass(frozen=True)
class Point:
    """A measured case as the guess sees it: `peak_s` is its time at the peak of its GPUs."""

    case: Case
    device: str
    peak_s: float
    measured_s: float

    @property
    def share(self) -> float:
        return self.peak_s / self.measured_s

    def keys(self, guess: Guess) -> tuple[Key, ...]:
        """The sets of rows that it may be guessed from, the nearest first."""
        same = (self.device, self.case.precision)
        return ((*same, self.case.sample.kind), same, ()) if guess == "alike" else (same, ())


@dataclass(frozen=True)
class Errors:
    """Relative errors of step times: of so many rows the median, and what nine of ten stay below."""

    rows: int
    median: float
    p90: float


def points(cases: Iterable[Case]) -> tuple[Point, ...]:
    """Of the cases that have a step time."""
    return tuple(_point(case, case.step_s) for case in cases if case.step_s is not None)


def _point(case: Case, measured_s: float) -> Point:
    device = device_of(case.cluster)
    rates: dict[str, float] = {str(dtype): rate for dtype, rate in device.rates.items()}
    # A dtype that a device only emulates has a peak below fp32's, which libraries then use.
    peak = max(rates.get(case.precision, 0.0), rates["fp32"])
    return Point(case, device.name, step_flops(case) / (case.plan.world_size * peak), measured_s)


def guess(known: Sequence[Point], how: Guess) -> dict[str, float]:
    """Seconds a step, by case id."""
    found: dict[str, float] = {}
    for source in {point.case.source for point in known}:
        kin = kin_of(source)
        own, others = (p for p in known if p.case.source == source), (p for p in known if p.case.source not in kin)
        shares = _shares(list(own if how == "own" else others), how)
        for point in known:
            if point.case.source == source:
                # Where there are no strangers, all of the peak.
                share = next((shares[key] for key in point.keys(how) if key in shares), 1.0)
                found[point.case.id] = point.peak_s / share
    return found


def _shares(calibration: Sequence[Point], how: Guess) -> dict[Key, float]:
    sets: dict[Key, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for point in calibration:
        for key in point.keys(how):
            sets[key][point.case.source if how == "alike" else ""].append(point.share)
    return {key: median(median(shares) for shares in voices.values()) for key, voices in sets.items()}


def errors(known: Iterable[Point], predicted_s: dict[str, float]) -> Errors:
    found = sorted(abs(predicted_s[p.case.id] - p.measured_s) / p.measured_s for p in known)
    return Errors(len(found), median(found), found[min(len(found) - 1, int(0.9 * len(found)))])

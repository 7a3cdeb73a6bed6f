"""The guess that the predictor has to beat: a GPU reaches a constant share of its peak, whatever it computes.

    step  = FLOPs / (ranks · share · peak)                                                    `guess_step_s`
    share = median over calibration rows of FLOPs / (ranks · seconds · peak)                  `TimedCase.share`

FLOPs are those of a step including recomputation, so the guess knows which plans recompute. The rows of a source are
guessed from the rows of sources that are not related to it. A `GuessMethod` says which of them set the share:

- `same_gpu`: those of the same GPU and precision; where there are none, all of them
- `similar_models`: those of the same GPU, precision and kind of model; where there are none, as `same_gpu`. Every
  source counts once, however many rows it has
- `same_source`: the rows of the source itself, of the same GPU and precision. Nobody could know these in advance: this
  is a bound on how good such a guess can be
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from validation.runs.case import PublishedCase
from validation.runs.reading.flops import step_flops
from validation.runs.reading.hardware import device_of
from validation.runs.related_sources import related_sources

GuessMethod = Literal["same_gpu", "similar_models", "same_source"]
GroupKey = tuple[str, ...]


@dataclass(frozen=True)
class TimedCase:
    """A case with a measured step time. `peak_s` is what the step would take at the peak rate of its GPUs."""

    case: PublishedCase
    device: str
    peak_s: float
    measured_s: float

    @property
    def share(self) -> float:
        """The share of the peak rate that the run reached."""
        return self.peak_s / self.measured_s

    def group_keys(self, method: GuessMethod) -> tuple[GroupKey, ...]:
        """The groups of rows that this case may be guessed from, the most similar group first."""
        same_gpu = (self.device, self.case.precision)
        if method == "similar_models":
            return (*same_gpu, self.case.sample.kind), same_gpu, ()
        return same_gpu, ()


@dataclass(frozen=True)
class GuessErrors:
    """Relative errors of the guessed step times of `rows` rows; nine of ten are below `p90`."""

    rows: int
    median: float
    p90: float


def timed_cases(cases: Iterable[PublishedCase]) -> tuple[TimedCase, ...]:
    """The cases that have a step time."""
    return tuple(_timed_case(case, case.step_s) for case in cases if case.step_s is not None)


def _timed_case(case: PublishedCase, measured_s: float) -> TimedCase:
    device = device_of(case.cluster)
    rates: dict[str, float] = {str(dtype): rate for dtype, rate in device.rates.items()}
    # A dtype that a device only emulates has a peak below that of fp32, which libraries then use instead.
    peak = max(rates.get(case.precision, 0.0), rates["fp32"])
    return TimedCase(case, device.name, step_flops(case) / (case.plan.world_size * peak), measured_s)


def guess_step_s(cases: Sequence[TimedCase], method: GuessMethod) -> dict[str, float]:
    """The guessed seconds of a step, by case id."""
    guessed_s: dict[str, float] = {}
    for source in {timed.case.source for timed in cases}:
        related = related_sources(source)
        of_source = [timed for timed in cases if timed.case.source == source]
        unrelated = [timed for timed in cases if timed.case.source not in related]
        shares = _median_shares(of_source if method == "same_source" else unrelated, method)
        for timed in of_source:
            # Without any unrelated source, the guess is the peak rate.
            share = next((shares[key] for key in timed.group_keys(method) if key in shares), 1.0)
            guessed_s[timed.case.id] = timed.peak_s / share
    return guessed_s


def _median_shares(calibration: Sequence[TimedCase], method: GuessMethod) -> dict[GroupKey, float]:
    groups: dict[GroupKey, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for timed in calibration:
        for key in timed.group_keys(method):
            groups[key][timed.case.source if method == "similar_models" else ""].append(timed.share)
    return {key: median(median(shares) for shares in by_source.values()) for key, by_source in groups.items()}


def guess_errors(cases: Iterable[TimedCase], predicted_s: dict[str, float]) -> GuessErrors:
    errors = sorted(abs(predicted_s[timed.case.id] - timed.measured_s) / timed.measured_s for timed in cases)
    return GuessErrors(len(errors), median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))])

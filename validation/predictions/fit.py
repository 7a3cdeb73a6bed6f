"""The launch factor of a source: how many times longer hosts need to start an operator than the reference GPU's host,
as fitted to the rows of other sources.

    vote   = median of ln(measured / predicted) over the rows of a source in which the device waits for its host
    `_votes` launch = exp(sum of votes / (number of votes + 1))
    `fit`

A source and its kin have one vote together, however many rows and models they have, and the reference has one vote
for no factor. The source itself and its kin do not vote on it. Rows that are off by more than `_LIMIT` do not count,
since they have another cause, nor do sources whose authors do not trust their own figures.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median

from validation.predictions.predict import PredictedCase
from validation.runs.related_sources import related_sources, untrusted_sources

_HOST_SHARE = 0.1  # of the step: a host that is waited for longer counts
_LIMIT = 2.0


@dataclass(frozen=True)
class LaunchFactor:
    """The factor, and the number of votes that it is fitted to."""

    launch: float
    votes: int


def fit(predictions: Sequence[PredictedCase]) -> dict[str, LaunchFactor]:
    """The launch factor of each source. The predictions are those without any factor."""
    waiting = [
        prediction
        for prediction in predictions
        if _waits_for_host(prediction) and prediction.case.source not in untrusted_sources()
    ]
    factors: dict[str, LaunchFactor] = {}
    for source in {prediction.case.source for prediction in predictions}:
        votes = _votes(prediction for prediction in waiting if prediction.case.source not in related_sources(source))
        factors[source] = LaunchFactor(exp(sum(votes) / (len(votes) + 1)), len(votes))
    return factors


def _waits_for_host(prediction: PredictedCase) -> bool:
    return prediction.breakdown["launch"] > _HOST_SHARE * prediction.step_s


def _votes(predictions: Iterable[PredictedCase]) -> list[float]:
    """One vote for each family of sources: the mean of the medians of its sources."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        assert prediction.case.step_s is not None
        if abs(ratio := log(prediction.case.step_s / prediction.step_s)) < log(_LIMIT):
            ratios[prediction.case.source].append(ratio)
    families: dict[frozenset[str], list[float]] = defaultdict(list)
    for source, source_ratios in ratios.items():
        families[related_sources(source)].append(median(source_ratios))
    return [mean(medians) for medians in families.values()]

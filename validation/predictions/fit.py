"""The launch factor of a source: how many times longer a host needs to launch an operator than the host of the
reference GPU. It is fitted to the rows of other sources.

    vote   = median of ln(measured / predicted) over the rows of a source in which the device waits for its host
             (`_votes`)
    launch = exp(sum of votes / (number of votes + 1))
             (`fit`)

A group of related sources (runs/related_sources.yaml) has one vote, however many rows and models it has, and the
reference host has one vote for a factor of 1. Neither a source nor the sources related to it vote on its own factor.
Two kinds of rows have no vote: rows that are off by more than `_LARGEST_RATIO`, because the host alone cannot explain
such an error, and rows of sources whose authors do not trust their own figures.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median

from validation.predictions.predict import PredictedCase
from validation.runs.related_sources import related_sources, untrusted_sources

_HOST_SHARE = 0.1  # a row votes if the device waits for its host for more than this share of the step
_LARGEST_RATIO = 2.0


@dataclass(frozen=True)
class LaunchFactor:
    """The factor `launch`, and the number of votes that it is fitted to."""

    launch: float
    votes: int


def fit(predictions: Sequence[PredictedCase]) -> dict[str, LaunchFactor]:
    """The launch factor of each source that has predictions. `predictions` must be made with a launch factor of 1."""
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
    """One vote for each group of related sources: the mean of the medians of its sources."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for prediction in predictions:
        assert prediction.case.step_s is not None
        if abs(ratio := log(prediction.case.step_s / prediction.step_s)) < log(_LARGEST_RATIO):
            ratios[prediction.case.source].append(ratio)
    groups: dict[frozenset[str], list[float]] = defaultdict(list)
    for source, source_ratios in ratios.items():
        groups[related_sources(source)].append(median(source_ratios))
    return [mean(medians) for medians in groups.values()]

"""What other sources' rows say of hosts: how much longer theirs take to start an operator than the reference GPU's.

    vote   = median of ln(measured / predicted) over the rows of a source in which the host is waited for       `_votes`
    launch = exp(sum of votes / (number of votes + 1))                                                          `fit`

A source and its kin have one vote, however many rows and models they have, and the reference has one for no factor. The
case's own source and its kin have none, nor have rows further off than `_LIMIT`, which tell of something else, and
sources that say themselves not to be trusted.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, log
from statistics import mean, median

from validation.predictions.predict import Predicted
from validation.runs.kin import kin_of, untrusted

_HOST_SHARE = 0.1
_LIMIT = 2.0


@dataclass(frozen=True)
class Factors:
    """`votes` are how many stood behind it."""

    launch: float
    votes: int


def fit(known: Sequence[Predicted]) -> dict[str, Factors]:
    """By source. `known` were predicted without any factor."""
    waited = [one for one in known if _is_waited_for(one) and one.case.source not in untrusted()]
    found: dict[str, Factors] = {}
    for source in {one.case.source for one in known}:
        votes = _votes(one for one in waited if one.case.source not in kin_of(source))
        found[source] = Factors(exp(sum(votes) / (len(votes) + 1)), len(votes))
    return found


def _is_waited_for(one: Predicted) -> bool:
    return one.breakdown["launch"] > _HOST_SHARE * one.step_s


def _votes(known: Iterable[Predicted]) -> list[float]:
    ratios: dict[str, list[float]] = defaultdict(list)
    for one in known:
        assert one.case.step_s is not None
        if abs(ratio := log(one.case.step_s / one.step_s)) < log(_LIMIT):
            ratios[one.case.source].append(ratio)
    families: dict[frozenset[str], list[float]] = defaultdict(list)
    for source, found in ratios.items():
        families[kin_of(source)].append(median(found))
    return [mean(found) for found in families.values()]

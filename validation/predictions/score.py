"""Scores of predictions: errors of step times, the order of plans in a family, and predictions that memory is too
small.

error  = |predicted - measured| / measured; the median, and the value that nine of ten rows stay below     `errors_of`
spread = the longest step of a case over its shortest, at most, where one was measured repeatedly          `spread`
tau    = (pairs in the right order - pairs in the wrong one) / pairs, of plans that differ                 `order_of`
alarm  = a row that ran, predicted to be out of memory; call = one that was out of memory, predicted so    `alarms`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from validation.runs.case import PublishedCase
from validation.runs.families import families

_EQUAL_WITHIN = 0.02  # measured steps that differ by less are not ordered


@dataclass(frozen=True)
class Errors:
    """The relative errors of so many rows: their median and 90th percentile."""

    rows: int
    median: float
    p90: float


def errors_of(cases: Iterable[PublishedCase], predicted_s: Mapping[str, float]) -> Errors:
    errors = sorted(abs(predicted_s[case.id] / case.step_s - 1) for case in cases if case.step_s is not None)
    return Errors(len(errors), median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))])


def spread(cases: Iterable[PublishedCase]) -> float:
    """How far apart a source's repeated measurements of one case are; no prediction can be near both. 1 where no case
    was measured twice."""
    steps: dict[str, list[float]] = {}
    for case in cases:
        if case.step_s is not None:
            same = replace(case, id="", family="", step_s=None, memory_bytes=None, memory_kind=None, defaults=())
            steps.setdefault(repr(same), []).append(case.step_s)
    return max((max(repeated) / min(repeated) for repeated in steps.values()), default=1.0)


@dataclass(frozen=True)
class Order:
    """The order of plans in families with at least two plans whose steps differ: `tau` over all pairs, and the median
    family's."""

    families: int
    pairs: int
    tau: float
    median_tau: float


def order_of(cases: Sequence[PublishedCase], predicted_s: Mapping[str, float]) -> Order | None:
    """None where no two plans of a family can be ordered."""
    families_agreements = []
    for members in families(cases).values():
        pairs = [
            (first, second)
            for first, second in combinations([case for case in members if case.id in predicted_s], 2)
            if first.plan != second.plan and _differ(first, second)
        ]
        if pairs:
            families_agreements.append([_agreement(first, second, predicted_s) for first, second in pairs])
    if not families_agreements:
        return None
    agreements = [agreement for family in families_agreements for agreement in family]
    taus = [sum(family) / len(family) for family in families_agreements]
    return Order(len(families_agreements), len(agreements), sum(agreements) / len(agreements), median(taus))


def _differ(first: PublishedCase, second: PublishedCase) -> bool:
    first_s, second_s = first.step_s or 0.0, second.step_s or 0.0
    return abs(first_s - second_s) > _EQUAL_WITHIN * min(first_s, second_s)


def _agreement(first: PublishedCase, second: PublishedCase, predicted_s: Mapping[str, float]) -> int:
    """1 where the predicted order of two cases is the measured one, else -1."""
    measured = (first.step_s or 0.0) < (second.step_s or 0.0)
    return 1 if measured == (predicted_s[first.id] < predicted_s[second.id]) else -1


@dataclass(frozen=True)
class Alarms:
    """Of the rows that `ran`, `false_alarms` were predicted to be out of memory; of those that `failed`, `called`
    were."""

    ran: int
    false_alarms: int
    failed: int
    called: int


def alarms(cases: Iterable[PublishedCase], fits: Mapping[str, bool]) -> Alarms:
    """`fits` says, by case, whether its memory was predicted to be enough."""
    predicted = [case for case in cases if case.id in fits]
    ran, failed = [case for case in predicted if not case.oom], [case for case in predicted if case.oom]
    return Alarms(
        len(ran), sum(not fits[case.id] for case in ran), len(failed), sum(not fits[case.id] for case in failed)
    )

"""Scores of predictions: errors of step times, the order of plans in a family, and predictions that memory is too
small.

    error  = |predicted - measured| / measured: the median, and the value that nine of ten rows stay below   `errors_of`
    spread = longest / shortest measured step time of one case that was measured repeatedly                  `spread`
    tau    = (pairs in the right order - pairs in the wrong order) / pairs, over plans that differ           `order_of`

    false alarm = a run that succeeded and was predicted to run out of memory                                `alarms`
    called      = a run that ran out of memory and was predicted to do so                                    `alarms`
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
    """The median and the 90th percentile of the relative errors of `rows` rows."""

    rows: int
    median: float
    p90: float


def errors_of(cases: Iterable[PublishedCase], predicted_s: Mapping[str, float]) -> Errors:
    """The errors of the cases that have a measured step time; `predicted_s` has the predictions by case id."""
    errors = sorted(abs(predicted_s[case.id] / case.step_s - 1) for case in cases if case.step_s is not None)
    return Errors(len(errors), median(errors), errors[min(len(errors) - 1, int(0.9 * len(errors)))])


def spread(cases: Iterable[PublishedCase]) -> float:
    """The largest ratio between two measured step times of the same case; no prediction can be near both. 1 if no case
    was measured twice."""
    steps: dict[str, list[float]] = {}
    for case in cases:
        if case.step_s is not None:
            configuration = replace(
                case, id="", family="", step_s=None, memory_bytes=None, memory_kind=None, defaults=()
            )
            steps.setdefault(repr(configuration), []).append(case.step_s)
    return max((max(repetitions) / min(repetitions) for repetitions in steps.values()), default=1.0)


@dataclass(frozen=True)
class Order:
    """How well plans are ordered in families that have at least two plans with different step times: `tau` over all
    pairs, and the median of the families' tau (`median_tau`)."""

    families: int
    pairs: int
    tau: float
    median_tau: float


def order_of(cases: Sequence[PublishedCase], predicted_s: Mapping[str, float]) -> Order | None:
    """How well the plans of each family are ordered; None if no two plans of a family have different step times."""
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
    """1 if the predicted order of the two cases is the measured order, else -1."""
    measured = (first.step_s or 0.0) < (second.step_s or 0.0)
    return 1 if measured == (predicted_s[first.id] < predicted_s[second.id]) else -1


@dataclass(frozen=True)
class Alarms:
    """`false_alarms` of the `ran` runs that succeeded, and `called` of the `failed` runs that ran out of memory, were
    predicted to run out of memory."""

    ran: int
    false_alarms: int
    failed: int
    called: int


def alarms(cases: Iterable[PublishedCase], fits: Mapping[str, bool]) -> Alarms:
    """Counts the cases in `fits`, which says by case id whether the memory was predicted to be sufficient."""
    predicted = [case for case in cases if case.id in fits]
    ran, failed = [case for case in predicted if not case.oom], [case for case in predicted if case.oom]
    return Alarms(
        len(ran), sum(not fits[case.id] for case in ran), len(failed), sum(not fits[case.id] for case in failed)
    )

"""How good predictions are: errors of step times, the order of plans in a family, and calls of memory.

error = |predicted - measured| / measured; median, and what nine of ten rows stay below           `errors_of`
apart = the longest step of a case over its shortest, at most, where one was measured repeatedly  `apart`
tau   = (pairs in the right order - pairs in the wrong one) / pairs, of plans that differ         `order_of`
alarm = a row that ran, called out of memory; call = one that did not, called so                  `alarms`
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

from validation.runs.case import Case
from validation.runs.families import families

_ALIKE = 0.02  # measured steps nearer than this are not ordered


@dataclass(frozen=True)
class Errors:
    rows: int
    median: float
    p90: float


def errors_of(cases: Iterable[Case], predicted_s: Mapping[str, float]) -> Errors:
    found = sorted(abs(predicted_s[case.id] / case.step_s - 1) for case in cases if case.step_s is not None)
    return Errors(len(found), median(found), found[min(len(found) - 1, int(0.9 * len(found)))])


def apart(cases: Iterable[Case]) -> float:
    """How far the source is from itself: no prediction of a case is near two steps of it that are far from each other.
    1 where no case was measured twice."""
    found: dict[str, list[float]] = {}
    for case in cases:
        if case.step_s is not None:
            same = replace(case, id="", family="", step_s=None, memory_bytes=None, memory_kind=None, defaults=())
            found.setdefault(repr(same), []).append(case.step_s)
    return max((max(steps) / min(steps) for steps in found.values()), default=1.0)


@dataclass(frozen=True)
class Order:
    """Of families with at least two plans whose steps differ: `tau` over all their pairs, and the median family's."""

    families: int
    pairs: int
    tau: float
    median_tau: float


def order_of(cases: Sequence[Case], predicted_s: Mapping[str, float]) -> Order | None:
    scores = []
    for members in families(cases).values():
        pairs = [
            (one, other)
            for one, other in combinations([c for c in members if c.id in predicted_s], 2)
            if one.plan != other.plan and _differ(one, other)
        ]
        if pairs:
            scores.append([_agree(one, other, predicted_s) for one, other in pairs])
    if not scores:
        return None
    everything = [score for family in scores for score in family]
    taus = [sum(family) / len(family) for family in scores]
    return Order(len(scores), len(everything), sum(everything) / len(everything), median(taus))


def _differ(one: Case, other: Case) -> bool:
    first, second = one.step_s or 0.0, other.step_s or 0.0
    return abs(first - second) > _ALIKE * min(first, second)


def _agree(one: Case, other: Case, predicted_s: Mapping[str, float]) -> int:
    measured = (one.step_s or 0.0) < (other.step_s or 0.0)
    return 1 if measured == (predicted_s[one.id] < predicted_s[other.id]) else -1


@dataclass(frozen=True)
class Alarms:
    """`ran` rows, so many of them called out of memory; `failed` ones, so many of them called."""

    ran: int
    false_alarms: int
    failed: int
    called: int


def alarms(cases: Iterable[Case], fits: Mapping[str, bool]) -> Alarms:
    known = [case for case in cases if case.id in fits]
    ran, failed = [c for c in known if not c.oom], [c for c in known if c.oom]
    return Alarms(
        len(ran), sum(not fits[case.id] for case in ran), len(failed), sum(not fits[case.id] for case in failed)
    )

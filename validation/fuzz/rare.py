"""Which operators and plans are drawn more often: those of which fewer programs were counted so far.

programs that an operator lacks   = LEAST_OF_OPERATOR - its programs       _lacking()
weight of a plan                  = usual weight · LEAST_OF_AXIS / programs of its rarest axis, at least the usual one
"""

from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

from validation.fuzz.counts import Counts
from validation.fuzz.operators.table import OPERATORS
from validation.fuzz.plans import PLANS, axes_of

LEAST_OF_OPERATOR, LEAST_OF_AXIS = 20, 300  # programs that each is to have
_MOST_FACTOR = 8.0


@dataclass(frozen=True)
class Rarity:
    """`operators` has an operator for each number, once for each program that it lacks; empty if all have enough.
    `plan_weights` are weights by plan."""

    operators: tuple[str, ...]
    plan_weights: Mapping[str, float]

    def operator(self, number: int) -> str | None:
        """The operator that the program of this number has; None for any."""
        return self.operators[number % len(self.operators)] if self.operators else None


def rarity_of(counts: Counts) -> Rarity:
    """The same counts give the same operators in the same order, so that processes with other numbers share them."""
    operators = [name for name in sorted(OPERATORS) for _ in range(_lacking(counts, name))]
    Random(len(operators)).shuffle(operators)
    return Rarity(tuple(operators), {name: kind.weight * _factor(counts, name) for name, kind in PLANS.items()})


def _lacking(counts: Counts, operator: str) -> int:
    return max(0, LEAST_OF_OPERATOR - sum(counts.get("operators", {}).get(operator, {}).values()))


def _factor(counts: Counts, plan: str) -> float:
    programs = [sum(counts.get("axes", {}).get(axis, {}).values()) for axis in axes_of(plan)]
    return min(_MOST_FACTOR, max(1.0, LEAST_OF_AXIS / max(1, min(programs))))

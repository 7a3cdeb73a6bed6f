"""The result of a search for plans: simulated plans, and plans that lower bounds have excluded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from meshwright.plan import Plan
from meshwright.planner.candidates import Candidate
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.preference import PredictedPlan
from meshwright.simulator.predict import Prediction

MOST_NOT_SIMULATED = 1500
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class PricedPlan:
    """A plan whose step was simulated. `PlanningInputs.fits` says whether it fits.
    `even` is the plan with an even division of batch and model, if machines are not alike and another division is
    better."""

    candidate: Candidate
    plan: Plan
    prediction: Prediction
    even: PredictedPlan | None = None

    @property
    def needed_bytes(self) -> int:
        return self.prediction.memory.device_bytes


@dataclass(frozen=True)
class ExcludedPlan:
    """A plan that was not simulated because a lower bound of its memory, `needed_bytes`, exceeds the capacity of a
    device."""

    candidate: Candidate
    plan: Plan
    needed_bytes: float


@dataclass(frozen=True)
class BoundedPlan:
    """A candidate that was not simulated, with a guess of its seconds per step, and a lower bound of its memory."""

    candidate: Candidate
    guess_s: float
    memory_bytes: float


@dataclass(frozen=True)
class SearchResult:
    """The result of a search, which took `seconds`. `summary` describes the model.

    ranked           plans that fit: the preferred one, then the others, the fastest first
    fastest          the plan with the shortest predicted step; that is `ranked[0]`, unless a simpler one is preferred
    family_bests     the best simulated plan of every family (plans that use the same axes): the preferred one of those
                     that fit, or if none fits, the plan that needs the least memory
    excluded         of every family that needs too much memory according to its bounds, the plan that needs the least
    candidate_count  the number of candidates, of which `priced_count` were simulated
    simulated        all plans that were simulated, in every precision
    not_simulated    other candidates, at most `MOST_NOT_SIMULATED`, taken evenly from all of them
    refusal          why a candidate was refused; empty if none was
    plain            the best plans of replicas, of shards and of replicas of shards within nodes, as far as they fit
    without_offload  if plans with `memory.offload` won, the best plan without (offload.py); None if none fits
    """

    ranked: tuple[PricedPlan, ...]
    fastest: PricedPlan | None
    family_bests: tuple[PricedPlan, ...]
    excluded: tuple[ExcludedPlan, ...]
    summary: ModelSummary
    candidate_count: int
    priced_count: int
    seconds: float
    simulated: tuple[PricedPlan, ...] = ()
    not_simulated: tuple[BoundedPlan, ...] = ()
    without_offload: PricedPlan | None = None
    refusal: str = ""
    plain: tuple[PricedPlan, ...] = ()


def evenly(items: Sequence[_Item]) -> tuple[_Item, ...]:
    """At most `MOST_NOT_SIMULATED` of the items, at equal distances."""
    return tuple(items[:: max(1, -(-len(items) // MOST_NOT_SIMULATED))])

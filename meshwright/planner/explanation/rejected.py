"""Why plans were not chosen: of each kind of plan that is not ranked, the best one, with the term of the step that
takes longer, or with the memory that it needs. Plans that a bound of their memory has excluded are predicted here, so
that the figure is what they need, and not the bound."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.planner.explanation.explain import reason, too_large
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import ExcludedPlan, PricedPlan, SearchResult
from meshwright.simulator.predict import predict_plan


@dataclass(frozen=True)
class Rejected:
    """A plan that was not chosen, and why. `family` are its axes; `too_large_bytes` is the memory that it needs of a
    device, None if it fits."""

    plan: Plan
    words: str
    family: tuple[str, ...]
    too_large_bytes: float | None


def rejected_plans(result: SearchResult, inputs: PlanningInputs, profiles: Profiles) -> tuple[Rejected, ...]:
    """The best plans of the kinds of which none is ranked, the fastest first; then those that were excluded."""
    best, ranked = result.ranked[0], {priced.candidate for priced in result.ranked}
    plain = {priced.candidate.sizes.family: priced for priced in result.plain}
    bests = [plain.get(priced.candidate.sizes.family, priced) for priced in result.family_bests]
    others = [priced for priced in sorted(bests, key=_step_s) if priced.candidate not in ranked]
    return (
        *(_rejected(priced, best, inputs) for priced in others),
        *(item for excluded in result.excluded for item in _excluded(excluded, best, inputs, profiles)),
    )


def _step_s(priced: PricedPlan) -> float:
    return priced.prediction.step_s


def _rejected(priced: PricedPlan, best: PricedPlan, inputs: PlanningInputs) -> Rejected:
    needed_bytes = None if inputs.fits(priced.prediction) else priced.needed_bytes
    return Rejected(priced.plan, reason(priced, best, inputs), priced.candidate.sizes.family, needed_bytes)


def _excluded(
    excluded: ExcludedPlan, best: PricedPlan, inputs: PlanningInputs, profiles: Profiles
) -> Iterator[Rejected]:
    priced = priced_excluded(excluded, inputs, profiles)
    if priced is not None:
        yield _rejected(priced, best, inputs)
        return
    words = too_large(excluded.needed_bytes, inputs, at_least=True)
    yield Rejected(excluded.plan, words, excluded.candidate.sizes.family, excluded.needed_bytes)


def priced_excluded(excluded: ExcludedPlan, inputs: PlanningInputs, profiles: Profiles) -> PricedPlan | None:
    """The prediction of a plan that a bound has excluded; None if the plan cannot be predicted."""
    plan = excluded.plan
    try:
        profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
        prediction = predict_plan(
            inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime
        )
    except InputError:
        return None
    return PricedPlan(excluded.candidate, plan, prediction)

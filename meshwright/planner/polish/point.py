"""`Point`: a candidate with the fields that candidates leave open; and `Prices`: the plan of a point, its predicted
step, and whether it fits. A step is predicted several times as fast as memory, so memory is only predicted of points
whose step is of interest."""

from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import BUCKET_BYTES
from meshwright.planner.candidates import Candidate, plan_of
from meshwright.planner.compute_variants import with_exchanges
from meshwright.planner.constraints.apply import applied
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.profiles import Profiles
from meshwright.planner.search_result import PricedPlan
from meshwright.planner.unequal.division import divided
from meshwright.simulator.predict import Prediction, plan_step_s, predict_plan

NEVER_S = float("inf")  # the step of a plan that cannot run
ComputeFields = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Point:
    """A candidate with fields of `compute`, the cast of weights, the size of buckets, and what is in CPU memory. Fields
    of `compute` that are not named have the values that `plan_of` gives them."""

    candidate: Candidate
    compute: ComputeFields = ()
    cast: str = "operators"
    bucket_bytes: int = BUCKET_BYTES
    offload: str = "none"

    @property
    def without_microbatch(self) -> tuple[Any, ...]:
        """All choices except those about microbatches and those that take no memory. Of two points that are equal in
        these, the one with larger microbatches needs more memory."""
        compute = tuple(item for item in self.compute if item[0] != "cuda_graphs")
        return self.candidate.without_microbatch, compute, self.cast, self.offload


@dataclass
class Prices:
    """The predictions of points, each made once.

    failed_recompute      levels of recomputation that the model cannot be traced with
    smallest_not_fitting  by `Point.without_microbatch`, the smallest microbatch that did not fit
    """

    inputs: PlanningInputs
    profiles: Profiles
    summary: ModelSummary
    priced: dict[Point, PricedPlan] = field(default_factory=dict)
    failed_recompute: set[str] = field(default_factory=set)
    smallest_not_fitting: dict[tuple[Any, ...], float] = field(default_factory=dict)
    _divisions: dict[tuple[Any, ...], Plan] = field(default_factory=dict)
    _plans: dict[Point, Plan | None] = field(default_factory=dict)
    _seconds: dict[Point, float] = field(default_factory=dict)

    def plan(self, point: Point) -> Plan | None:
        """The plan of a point; None if the executor or the constraints refuse it."""
        if point not in self._plans:
            try:
                self._plans[point] = self._make_plan(point)
            except (InputError, ValidationError):
                self._plans[point] = None
        return self._plans[point]

    def _make_plan(self, point: Point) -> Plan | None:
        candidate, inputs = point.candidate, self.inputs
        if candidate.recompute in self.failed_recompute:
            return None
        if candidate.sizes.pipeline > 1 and self.summary.cuts(candidate.stages, candidate.recompute) is None:
            return None
        plan = plan_of(candidate, self.summary, inputs)
        updates: dict[str, Any] = {}
        if point.compute:
            updates["compute"] = plan.compute.model_copy(update=dict(point.compute))
        if point.cast != plan.numerics.cast:
            updates["numerics"] = plan.numerics.model_copy(update={"cast": point.cast})
        if point.bucket_bytes != plan.gradients.bucket_bytes:
            updates["gradients"] = plan.gradients.model_copy(update={"bucket_bytes": point.bucket_bytes})
        if point.offload != plan.memory.offload:
            updates["memory"] = plan.memory.model_copy(update={"offload": point.offload})
        plan = applied(plan.model_copy(update=updates) if updates else plan, inputs.constraints)
        inputs.check_plan(plan)
        if not self._is_traced(candidate):
            return None
        profile = self.profiles.get(candidate.precision, candidate.recompute)
        return applied(with_exchanges(plan, profile, inputs.cluster, self.step_s), inputs.constraints)

    def _is_traced(self, candidate: Candidate) -> bool:
        """Traces the model with the candidate's recomputation, if it was not before."""
        try:
            profile = self.profiles.get(candidate.precision, candidate.recompute)
        except InputError:
            if candidate.recompute == "none":
                raise
            self.failed_recompute.add(candidate.recompute)  # some models cannot recompute their activations
            return False
        self.summary.add_profile(candidate.recompute, profile)
        return True

    def predict(self, plan: Plan) -> Prediction:
        inputs, profile = self.inputs, self.profiles.get(plan.numerics.precision, plan.memory.recompute)
        return predict_plan(
            inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime
        )

    def step_s(self, plan: Plan) -> float:
        inputs, profile = self.inputs, self.profiles.get(plan.numerics.precision, plan.memory.recompute)
        return plan_step_s(inputs.cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)

    def seconds(self, point: Point) -> float:
        """The predicted step; `NEVER_S` for a point that cannot run."""
        if point not in self._seconds:
            plan = self._divided_plan(point)
            self._seconds[point] = self.step_s(plan) if plan is not None else NEVER_S
        return self._seconds[point]

    def _divided_plan(self, point: Point) -> Plan | None:
        """The plan of a point. Machines that are not alike divide batch and model as is best for the first point with
        the same axes and stages."""
        plan = self.plan(point)
        if plan is None or self.inputs.cluster.is_uniform:
            return plan
        key = _stages_key(point)
        if key not in self._divisions:
            self.divide(point)
        known = self._divisions[key]
        pipeline = plan.pipeline.model_copy(update={"cuts": known.pipeline.cuts})
        other = plan.model_copy(update={"shares": known.shares, "pipeline": pipeline})
        try:
            self.inputs.check_plan(other)
        except InputError:
            return plan
        return other

    def price(self, point: Point) -> PricedPlan | None:
        """The whole prediction; None for a point that cannot run."""
        if point not in self.priced:
            plan = self._divided_plan(point)
            if plan is None:
                return None
            if point not in self.priced:
                self.priced[point] = PricedPlan(point.candidate, plan, self.predict(plan))
            if not self.inputs.fits(self.priced[point].prediction):
                key, samples = point.without_microbatch, point.candidate.microbatch_samples
                self.smallest_not_fitting[key] = min(self.smallest_not_fitting.get(key, samples), samples)
        return self.priced[point]

    def divide(self, point: Point) -> None:
        """Divides batch and model among machines that are not alike as is best for this point."""
        plan = self.plan(point)
        if self.inputs.cluster.is_uniform or plan is None:
            return
        profile = self.profiles.get(point.candidate.precision, point.candidate.recompute)
        best, even = divided(plan, self.inputs, self.predict, profile, self.summary)
        known = self.priced.get(point)
        if known is not None and self.inputs.fits(known.prediction) and known.prediction.step_s <= best[1].step_s:
            evenly = even or best
            if known.plan != evenly[0]:
                self.priced[point] = replace(known, even=evenly)
            return
        self._divisions[_stages_key(point)] = best[0]
        self.priced[point] = PricedPlan(point.candidate, *best, even=even)
        self._seconds[point] = best[1].step_s

    def fits(self, point: Point) -> bool:
        if point not in self.priced and self.inputs.cluster.is_uniform:
            samples = point.candidate.microbatch_samples
            if samples >= self.smallest_not_fitting.get(point.without_microbatch, samples + 1):
                return False
        priced = self.price(point)
        return priced is not None and self.inputs.fits(priced.prediction)


def _stages_key(point: Point) -> tuple[Any, ...]:
    candidate = point.candidate
    return candidate.sizes, candidate.schedule, candidate.stages_per_rank

"""The plan of each strategy on a number of devices, and what is predicted for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from meshwright.auto.decide import plan_of_job
from meshwright.auto.inputs import planning_inputs
from meshwright.bench.strategies.catalog import ALL_CORES, AUTO, HYBRID, ON_ONE_DEVICE
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import STAGES_PER_RANK
from meshwright.planner.candidates import AxisSizes, Candidate, plan_of
from meshwright.planner.explanation.explain import too_large
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.measured_search import with_measured_operators
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.offload import search_with_offload
from meshwright.planner.profiles import Profiles
from meshwright.planner.summarize import summarize_model
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.train.job_parts import JobParts

NEEDS_SEVERAL_DEVICES = "it needs several devices, but the cluster has one"
_MEASURE_OPERATORS_S = 1.0
_STAGES_PER_RANK = {**STAGES_PER_RANK, "interleaved_1f1b": 2, "zero_bubble": 1}
Planning = Callable[[], tuple[PlanningInputs, Profiles]]


@dataclass
class StrategyPlanner:
    """Plans and predicts strategies for a job on a cluster. `threads` is the number of cores of one CPU device; None on
    GPUs."""

    parts: JobParts
    cluster: Cluster
    threads: int | None

    @cached_property
    def planning(self) -> tuple[PlanningInputs, Profiles]:
        """The model's profiles, and the cluster with the measured times of its operators if it is this machine."""
        inputs, profiles = planning_inputs(self.parts, self.cluster, allow="same", even_shares=False)
        return with_measured_operators(inputs, profiles, _MEASURE_OPERATORS_S), profiles

    def plan(self, strategy: str, precision: str) -> Plan:
        """Returns the plan of a strategy. If there is none, raises an `InputError` with the reason."""
        if strategy == AUTO:
            return plan_of_job(self.parts, self.cluster, "auto").plan
        devices = self.cluster.device_count
        if devices == 1 and strategy in (HYBRID, ALL_CORES):
            raise InputError(NEEDS_SEVERAL_DEVICES)
        if strategy == HYBRID:
            plan = self._hybrid()
        elif strategy == ALL_CORES:
            return _with(Plan(), precision, None if self.threads is None else self.threads * devices)
        else:
            plan = strategy_plan(strategy, devices, lambda: self.planning)
        return _with(plan, precision, self.threads)

    def predict(self, plan: Plan) -> Prediction | None:
        """Returns the prediction of a plan; None if the model cannot be traced or the plan cannot be predicted."""
        try:
            inputs, profiles = self.planning
            profile = profiles.get(plan.numerics.precision, plan.memory.recompute)
            devices = min(plan.world_size, self.cluster.device_count)
            cluster = inputs.cluster
            if devices < cluster.device_count:
                cluster = cluster.with_device_count(devices)
            return predict_plan(cluster, profile, plan, inputs.global_batch, inputs.optimizer, runtime=inputs.runtime)
        except MeshwrightError:
            return None

    def why_too_large(self, prediction: Prediction) -> str | None:
        """Says that a plan needs more memory than a device has; None if it fits."""
        inputs, _ = self.planning
        needed_bytes = prediction.memory.device_bytes
        return too_large(needed_bytes, inputs) if needed_bytes > inputs.capacity_bytes else None

    def _hybrid(self) -> Plan:
        """Returns the plan that is predicted to be the fastest of those that combine several kinds of parallelism."""
        inputs, profiles = self.planning
        result = search_with_offload(inputs, profiles)
        plans = [*result.ranked, *result.family_bests]
        fitting = [priced for priced in plans if inputs.fits(priced.prediction)]
        hybrids = [priced for priced in fitting if len(priced.candidate.sizes.family) > 1]
        if not hybrids:
            devices = self.cluster.device_count
            raise InputError(f"no plan combines several kinds of parallelism for this model on {devices} devices")
        return min(hybrids, key=lambda priced: priced.prediction.step_s).plan


def _with(plan: Plan, precision: str, threads: int | None) -> Plan:
    numerics = plan.numerics.model_copy(update={"precision": precision})
    return plan.model_copy(
        update={"numerics": numerics, "compute": plan.compute.model_copy(update={"threads": threads})}
    )


def strategy_plan(strategy: str, devices: int, planning: Planning) -> Plan:
    """Returns the plan, in fp32. `planning` traces the model; it is called only for the strategies that divide the
    model. If there is no such plan, raises an `InputError` with the reason."""
    if strategy in ON_ONE_DEVICE:
        return Plan()
    if devices == 1:
        raise InputError(NEEDS_SEVERAL_DEVICES)
    kind, _, variant = strategy.partition(" ")
    simple: dict[str, dict[str, Any]] = {
        "replicate": {"axes": {"replicate": devices}, "gradients": {"algorithm": variant}},
        "servers": {"axes": {"replicate": devices}, "gradients": {"servers": 1, "updates": variant}},
        "shard": {"axes": {"shard": devices}, "memory": {"sharding": variant}},
    }
    if kind in simple:
        return Plan.model_validate(simple[kind])
    inputs, profiles = planning()
    summary = summarize_model(inputs, profiles, "fp32")
    if kind == "tensor":
        return plan_of(_tensor_candidate(summary, inputs), summary, inputs)
    return _pipeline_plan(variant, summary, inputs)


def _tensor_candidate(summary: ModelSummary, inputs: PlanningInputs) -> Candidate:
    if summary.split_group_count == 0:
        raise InputError("the model has no layers that can be split along the tensor axis")
    sizes = AxisSizes(tensor=inputs.cluster.device_count)
    return Candidate(sizes, "fp32", "none", "1f1b", 1, 1, inputs.global_batch)


def _pipeline_plan(schedule: str, summary: ModelSummary, inputs: PlanningInputs) -> Plan:
    """Returns a pipeline over all devices with twice as many microbatches as stages, or with as many as there are
    samples if these are fewer. With twice as many, at most a third of a step is bubble."""
    ranks, batch = inputs.cluster.device_count, inputs.global_batch
    per_rank = _STAGES_PER_RANK[schedule]
    stages = ranks * per_rank
    ends = summary.cuts(stages, "none")
    if ends is None:
        places = sum(piece.cuttable for piece in summary.pieces)
        reason = f": {summary.structure.no_cut_reason}" if summary.structure and summary.structure.no_cut_reason else ""
        raise InputError(f"the model can be cut in {places} places, too few for {stages} stages{reason}")
    cuts = [summary.pieces[piece].name for piece in ends]
    pipeline = {"schedule": schedule, "microbatches": min(2 * stages, batch), "cuts": cuts}
    return Plan.model_validate({"axes": {"pipeline": ranks}, "pipeline": pipeline})

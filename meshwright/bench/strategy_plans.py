"""The plan of each strategy that the strategies benchmark compares: a plan with one axis over all devices, or the one
that `plan: auto` finds."""

from collections.abc import Callable

from meshwright.auto.choose import plan_of_job
from meshwright.auto.inputs import planning_inputs
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import Axes, Plan
from meshwright.planner.candidates import AxisSizes, Candidate, plan_of
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import summarize_model
from meshwright.train.job_parts import JobParts


def strategy_plan(strategy: str, parts: JobParts, cluster: Cluster) -> Plan:
    """Returns the plan that trains a job with this strategy. If there is none, raises an `InputError` with the
    reason."""
    if strategy == "auto":
        return plan_of_job(parts, cluster, "auto").plan
    return one_axis_plan(strategy, cluster.device_count, lambda: planning_inputs(parts, cluster, allow="same"))


def one_axis_plan(strategy: str, devices: int, planning: Callable[[], tuple[PlanningInputs, Profiles]]) -> Plan:
    """Returns the plan with one axis over all devices. `planning` traces the model; it is called only for the
    strategies `tensor` and `pipeline`, which divide the model. If the model cannot be divided in this way, raises an
    `InputError` with the reason."""
    if strategy == "one rank":
        return Plan()
    if devices == 1:
        raise InputError(f"{strategy} needs several devices, but the cluster has one")
    if strategy == "replicate":
        return Plan(axes=Axes(replicate=devices))
    if strategy == "shard":
        return Plan(axes=Axes(shard=devices))
    inputs, profiles = planning()
    summary = summarize_model(inputs, profiles, "fp32")
    candidate = _tensor_candidate(summary, inputs) if strategy == "tensor" else _pipeline_candidate(summary, inputs)
    return plan_of(candidate, summary, inputs)


def _tensor_candidate(summary: ModelSummary, inputs: PlanningInputs) -> Candidate:
    if summary.split_group_count == 0:
        raise InputError("the model has no layers that can be split along the tensor axis")
    sizes = AxisSizes(tensor=inputs.cluster.device_count)
    return Candidate(sizes, "fp32", "none", "1f1b", 1, 1, inputs.global_batch)


def _pipeline_candidate(summary: ModelSummary, inputs: PlanningInputs) -> Candidate:
    """Returns a pipeline over all devices with twice as many microbatches as stages, or with as many as there are
    samples if these are fewer. With twice as many, at most a third of a step is bubble."""
    stages, batch = inputs.cluster.device_count, inputs.global_batch
    if summary.cuts(stages, "none") is None:
        cuts = sum(piece.cuttable for piece in summary.pieces)
        reason = f": {summary.structure.no_cut_reason}" if summary.structure and summary.structure.no_cut_reason else ""
        raise InputError(f"the model can be cut in {cuts} places, too few for {stages} stages{reason}")
    count = min(2 * stages, batch)
    return Candidate(AxisSizes(pipeline=stages), "fp32", "none", "1f1b", 1, count, -(-batch // count))

"""Constraints that no plan can keep: each is named in one line before the search, with values and what to do.

check_inputs  contradictions to the cluster, the batch, `allow`, and of fixed fields to each other
check_model   contradictions to the model, which is traced for them
"""

from math import prod
from typing import Any, cast

from meshwright.dtypes import Dtype
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.plan_fields.groups import GROUPS, MESH_ORDER
from meshwright.plan_rules.table import contradiction
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import ModelSummary

# Fields of which a search takes no other values than the defaults, unless they are fixed.
_NOT_SEARCHED = (
    *("gradients.precision", "gradients.powersgd_rank", "gradients.local_steps", "gradients.servers"),
    *("gradients.updates", "numerics.batch_norm", "shares.adaptive"),
)


def check_inputs(inputs: PlanningInputs) -> None:
    """Raises an `InputError` if no model can be trained under the constraints with these inputs."""
    constraints = inputs.constraints
    if not constraints:
        return
    if inputs.allow == "same" and (beyond := constraints.beyond("same")):
        raise InputError(
            f"{beyond} is fixed, which changes the numerical result, but only plans that compute the same are wanted"
            " (--exact, or allow: same): leave out one"
        )
    _check_device(inputs)
    _check_axes(inputs)
    _check_microbatches(inputs)
    _check_rules(inputs)


def _check_device(inputs: PlanningInputs) -> None:
    """Raises an `InputError` for fields that the devices of the cluster cannot have."""
    fixed, device = inputs.constraints.fixed, inputs.device
    precision = fixed.get("numerics.precision", "fp32")
    for dtype, other in (("fp8", "bf16"), ("tf32", "fp32")):
        if precision == dtype and not device.accelerates(cast(Dtype, dtype)):
            raise InputError(
                f"numerics.precision is fixed to {dtype}, but the {device.name} has no instructions for it: choose"
                f" {other}"
            )
    if fixed.get("compute.cuda_graphs") and not device.has_graphs:
        raise InputError(
            f"compute.cuda_graphs is fixed to true, but '{inputs.cluster.name}' has no GPUs of NVIDIA or AMD: leave it"
            " out"
        )


def _check_axes(inputs: PlanningInputs) -> None:
    fixed, devices, batch = inputs.constraints.fixed, inputs.cluster.device_count, inputs.global_batch
    sizes = {axis: fixed[f"axes.{axis}"] for axis in MESH_ORDER if f"axes.{axis}" in fixed}
    product = prod(sizes.values())
    words = " × ".join(f"{axis}({size})" for axis, size in sizes.items() if size > 1) or "one rank"
    has_other_ranks = batch < devices and product <= devices  # a small batch may leave devices unused
    if devices % product and not has_other_ranks:
        raise InputError(
            f"the fixed axes, {words}, make {product} ranks, which do not divide the {devices} devices of"
            f" '{inputs.cluster.name}': choose sizes whose product divides {devices}"
        )
    if len(sizes) == len(MESH_ORDER) and product != devices and not has_other_ranks:
        raise InputError(
            f"all axes are fixed, to {words}, which make {product} ranks, but '{inputs.cluster.name}' has {devices}"
            " devices: leave one axis free, or choose another cluster"
        )
    data_ranks = sizes.get("replicate", 1) * sizes.get("shard", 1)
    if data_ranks > batch:
        raise InputError(
            f"replicate × shard is fixed to at least {data_ranks} ranks, among which a batch of {batch} samples cannot"
            " be divided: choose another size, or another batch"
        )


def _check_microbatches(inputs: PlanningInputs) -> None:
    fixed, batch = inputs.constraints.fixed, inputs.global_batch
    fields = [name for name in ("memory.accumulation", "pipeline.microbatches") if fixed.get(name, 1) > 1]
    parts = prod(fixed[name] for name in fields)
    # Where the devices do not divide the batch, shares and microbatches may be unequal.
    is_even = inputs.even_shares and batch % inputs.cluster.device_count == 0
    if parts > batch or (is_even and batch % parts):
        words = " × ".join(f"{name}={fixed[name]}" for name in fields)
        raise InputError(
            f"{words} cuts a rank's share into {parts} microbatches, into which a batch of {batch} samples cannot be"
            f" divided{' equally' if parts <= batch else ''}: choose another number, or another batch"
        )


def _check_rules(inputs: PlanningInputs) -> None:
    """Raises an `InputError` if a rule refuses the fixed fields, whatever values the search gives to the others."""
    fixed = inputs.constraints.fixed
    values: dict[str, dict[str, Any]] = {name: {} for name in GROUPS}
    for name, value in fixed.items():
        group, field = name.split(".")
        values[group][field] = value
    groups: dict[str, Any] = {name: kind.model_validate(values[name]) for name, kind in GROUPS.items()}
    plan, cluster = Plan.model_construct(**groups), inputs.cluster
    reason = contradiction(plan, {*fixed, *_NOT_SEARCHED}, device=cluster.kind, cluster=f"'{cluster.name}'")
    if reason is not None:
        raise InputError(reason)


def check_model(inputs: PlanningInputs, summary: ModelSummary) -> None:
    """Raises an `InputError` if the model cannot be divided as the constraints say."""
    fixed = inputs.constraints.fixed
    if not fixed:
        return
    _check_tensor(fixed, summary)
    _check_pipeline(fixed, summary)
    context, expert = fixed.get("axes.context", 1), fixed.get("axes.expert", 1)
    if context > 1 and summary.sequence_length % context:
        raise InputError(
            f"axes.context is fixed to {context}, but "
            + (
                f"the sequences have {summary.sequence_length} tokens, which it does not divide: choose a divisor"
                if summary.sequence_length
                else "the model has no sequences that ranks could divide: leave it out"
            )
        )
    if not summary.sequence_length and context > 1:
        raise InputError(f"axes.context is fixed to {context}, but the model has no sequences that ranks could divide")
    if expert > 1 and summary.expert_degree % expert:
        number = summary.expert_degree
        experts = f"its {number} experts cannot be divided over so many" if number > 1 else "the model has no experts"
        raise InputError(f"axes.expert is fixed to {expert} ranks, but {experts}: choose a divisor, or leave it out")
    recompute = fixed.get("memory.recompute", "none")
    if recompute != "none" and not any(piece.recomputable for piece in summary.pieces):
        raise InputError(
            f"memory.recompute is fixed to {recompute}, but the model has no equal blocks that could be recomputed:"
            " leave it out"
        )


def _check_tensor(fixed: dict[str, Any], summary: ModelSummary) -> None:
    tensor, degree = fixed.get("axes.tensor", 1), summary.tensor_degree
    largest_group = max((len(group.branches) for group in summary.branch_groups), default=1)
    if tensor == 1 or fixed.get("modules.splits") or degree % tensor == 0 or tensor <= largest_group:
        return
    if degree == 1:
        raise InputError(
            f"axes.tensor is fixed to {tensor}, but the model has no layers that ranks could divide: leave it out"
        )
    raise InputError(
        f"axes.tensor is fixed to {tensor}, but the layers of the model can be divided over at most {degree} ranks, and"
        f" over divisors of {degree}: choose one of them"
    )


def _check_pipeline(fixed: dict[str, Any], summary: ModelSummary) -> None:
    places = [piece.name for piece in summary.pieces if piece.cuttable]
    pipeline = fixed.get("axes.pipeline", 1)
    if pipeline > len(places) + 1:
        raise InputError(
            f"axes.pipeline is fixed to {pipeline}, but the model can be cut into at most {len(places) + 1} stages:"
            " choose fewer"
        )
    for cut in fixed.get("pipeline.cuts", ()):
        if cut not in places:
            raise InputError(f"pipeline.cuts: the model cannot be cut after '{cut}'{did_you_mean(cut, places)}")


def no_plan_keeps(inputs: PlanningInputs, refusal: str = "") -> str:
    """The error message for constraints that no candidate keeps. `refusal` is why one was refused."""
    cluster = inputs.cluster.name
    if not inputs.constraints:
        return f"no plan can be run on '{cluster}'"
    because = f": {refusal}" if refusal else ": leave out one of them"
    return (
        f"no plan for {inputs.global_batch} samples on '{cluster}' keeps the constraints"
        f" ({inputs.constraints.describe()}){because}"
    )

"""The plan that an `Accelerator` was given, the precision that goes with it, and which plans loops of Accelerate can
run."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.job import load_plan
from meshwright.plan import Axes, Plan

PlanArgument = Plan | Mapping[str, Any] | str | Path | None  # None: every rank is a replica
Precision = Literal["fp32", "bf16", "fp16"]
_PRECISIONS: dict[str, Precision] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def read_plan(argument: PlanArgument, ranks: int, mixed_precision: str, device_type: str) -> Plan:
    """Returns the plan that was given, which is not `auto`, with the precision of Accelerate's `mixed_precision`."""
    is_default = argument is None
    if isinstance(argument, Plan):
        plan = argument
    else:
        plan = Plan(axes=Axes(replicate=ranks)) if argument is None else load_plan(argument, "Accelerator")
    if plan.world_size != ranks:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but {ranks} were started: start as many, or"
            " change the plan's axes"
        )
    plan = _with_precision(plan, mixed_precision, device_type, is_default)
    check_plan(plan)
    return plan


def _with_precision(plan: Plan, mixed_precision: str, device_type: str, is_default: bool) -> Plan:
    """Returns the plan with the precision of `mixed_precision`. With a plan of the user's, both have to agree, unless
    `mixed_precision` is `no`, its default, which leaves the precision to the plan."""
    wanted, planned = _PRECISIONS[mixed_precision], plan.numerics.precision
    if wanted == "fp16" and device_type == "cpu":
        warnings.warn(
            "mixed_precision is fp16, which Accelerate uses on GPUs only: on the CPU this trains without it",
            stacklevel=6,
        )
        wanted = "fp32"
    if wanted in ("fp32", planned):
        return plan
    if not is_default:
        raise InputError(
            f"mixed_precision is {mixed_precision}, but the plan says numerics.precision: {planned}: leave"
            f" mixed_precision out, as the plan decides it, or write numerics.precision: {wanted} in the plan"
        )
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": wanted})})


def check_plan(plan: Plan) -> None:
    """Raises an `InputError` if a loop of Accelerate cannot run the plan."""
    reason = _why_not(plan)
    if reason is not None:
        raise InputError(
            f"loops of Accelerate cannot run the plan ({plan.summary()}): {reason}; or train with mw.parallelize"
            " (docs/loops.md)"
        )


def _why_not(plan: Plan) -> str | None:
    """Returns why a loop of Accelerate cannot run the plan, and what to change; None if it can."""
    axes = [axis for axis in ("tensor", "pipeline") if getattr(plan.axes, axis) > 1]
    if axes:
        return f"axes.{axes[0]} is {getattr(plan.axes, axes[0])}: choose a plan of replicas and shards"
    if plan.modules.splits or plan.modules.branches:
        return "it divides layers: choose a plan of replicas and shards"
    if plan.gradients.servers:
        return "only `meshwright train` starts parameter servers: set gradients.servers to 0"
    if plan.memory.accumulation > 1:
        return (
            f"memory.accumulation is {plan.memory.accumulation}: set it to 1, and accumulate with"
            " Accelerator(gradient_accumulation_steps=…)"
        )
    if plan.gradients.local_steps > 1:
        return "set gradients.local_steps to 1"
    if plan.gradients.powersgd_rank:
        return "set gradients.powersgd_rank to 0"
    if plan.numerics.precision == "fp16" and plan.axes.shard > 1:
        return "numerics.precision is fp16 and weights are sharded: choose bf16, or replicas"
    return None

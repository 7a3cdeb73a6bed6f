"""The plan that an `Accelerator` was given, the precision that goes with it, and which plans loops of Accelerate can
run."""

import warnings
from typing import Literal

from meshwright.compat.plan_argument import PlanArgument, read_plan, with_precision
from meshwright.errors import InputError
from meshwright.plan import Plan

_PRECISIONS: dict[str, Literal["fp32", "bf16", "fp16"]] = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}


def plan_of_argument(
    argument: PlanArgument, ranks: int, mixed_precision: str, device_type: str, *, plan_decides: bool
) -> Plan:
    """Returns the plan, which is not `auto`, with the precision of Accelerate's `mixed_precision`. `plan_decides`: the
    user has written the plan, so `mixed_precision` has to agree with it."""
    plan = read_plan(argument, ranks, "Accelerator")
    if plan.world_size != ranks:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but {ranks} were started: start as many, or"
            " change the plan's axes"
        )
    wanted = _PRECISIONS[mixed_precision]
    if wanted == "fp16" and device_type == "cpu":
        warnings.warn(
            "mixed_precision is fp16, which Accelerate uses on GPUs only: on the CPU this trains without it",
            stacklevel=5,
        )
        wanted = "fp32"
    plan = with_precision(plan, wanted, "mixed_precision", mixed_precision, plan_decides=plan_decides)
    check_plan(plan)
    return plan


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
    axes = [axis for axis in ("context", "tensor", "pipeline", "expert") if getattr(plan.axes, axis) > 1]
    if axes:
        return f"axes.{axes[0]} is {getattr(plan.axes, axes[0])}: choose a plan of replicas and shards"
    if plan.modules.splits or plan.modules.branches:
        return "it divides layers: choose a plan of replicas and shards"
    if plan.shares.shards:
        return "shares.shards gives ranks unequal shards: leave it out"
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

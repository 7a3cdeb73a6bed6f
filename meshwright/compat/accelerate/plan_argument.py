"""The plan that an `Accelerator` was given, the precision that goes with it, and which plans loops of Accelerate can
run."""

import warnings
from typing import Literal

from meshwright.compat.plan_argument import PlanArgument, read_plan, with_precision
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import refusal

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
    if (reason := refusal(plan, "Accelerate")) is not None:
        raise InputError(
            f"loops of Accelerate cannot run the plan ({plan.summary()}): {reason}; or train with mw.parallelize"
            " (docs/loops.md)"
        )

"""The arguments of a strategy, and which plans Lightning's loops can run."""

from collections.abc import Iterable
from typing import Literal

from meshwright.compat.plan_argument import (
    PlanArgument,
    read_plan,
    with_precision,
)
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules, refusal

CheckpointFormat = Literal["lightning", "meshwright"]
_OPTIONS = (
    "accelerator",
    "parallel_devices",
    "cluster_environment",
    "checkpoint_io",
    "precision",
    "precision_plugin",
    "process_group_backend",
    "timeout",
    "start_method",
)
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"32-true": "fp32", "bf16-mixed": "bf16"}


def plan_of_argument(argument: PlanArgument, ranks: int, flag: str, *, plan_decides: bool) -> Plan:
    """Returns the plan that a strategy was given, which is not `auto`, in the precision of Lightning's `precision`
    flag. `plan_decides`: the user has written the plan, so the flag has to agree with it."""
    plan = read_plan(argument, ranks, "MeshwrightStrategy")
    return with_precision(plan, PRECISIONS[flag], "precision", flag, plan_decides=plan_decides)


def check_precision(flag: str) -> None:
    """Raises an `InputError` if a plan cannot do what Lightning's `precision` flag asks for."""
    if flag not in PRECISIONS:
        raise InputError(
            f"precision is {flag}, which the strategy meshwright does not have: leave it out, and set"
            " numerics.precision of the plan, or build the module in the dtype that you want"
        )


def check_format(checkpoint_format: str) -> None:
    if checkpoint_format not in ("lightning", "meshwright"):
        raise InputError(f"checkpoint_format is {checkpoint_format!r}: give 'lightning' or 'meshwright'")


def check_options(options: Iterable[str]) -> None:
    """Raises an `InputError` for options that Lightning's strategy would hand to DDP, which is not used here."""
    for name in options:
        if name not in _OPTIONS:
            raise InputError(
                f"the strategy meshwright does not have the option {name}: leave it out. The plan says how gradients"
                " are combined (group gradients), unused parameters need no option, and the other options are"
                f" {', '.join(_OPTIONS)}"
            )


def check_loop_plan(plan: Plan) -> None:
    """Raises an `InputError` if Lightning's training loop cannot run the plan on a whole module."""
    check_rules(plan, "library", caller="Lightning")
    if (reason := refusal(plan, "Lightning")) is not None:
        raise InputError(f"Lightning's loop cannot run the plan ({plan.summary()}) on a whole module: {reason}")


def check_ranks(plan: Plan, ranks: int) -> None:
    if plan.world_size != ranks:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but Lightning has started {ranks}: choose"
            f" devices and num_nodes whose product is {plan.world_size}, or a plan for {ranks} ranks"
        )

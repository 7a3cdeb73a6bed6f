"""The plan that a strategy was given, and which plans Lightning's loops can run."""

from typing import Literal

from meshwright.compat.plan_argument import PlanArgument, read_plan, with_precision
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.step.own_loop import why_only_step

CheckpointFormat = Literal["lightning", "meshwright"]
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


def check_loop_plan(plan: Plan) -> None:
    """Raises an `InputError` if Lightning's training loop cannot run the plan on a whole module."""
    axes = [axis for axis in ("tensor", "pipeline") if getattr(plan.axes, axis) > 1]
    if axes or plan.modules.splits or plan.modules.branches:
        what = f"axes.{axes[0]} is {getattr(plan.axes, axes[0])}" if axes else "it divides layers"
        raise InputError(
            f"the plan ({plan.summary()}) cannot run on a whole LightningModule, because {what}: define the hook"
            " session(self, plan) that returns mw.parallelize(…) of the part that is the model, or choose a plan of"
            " replicas and shards"
        )
    if plan.gradients.servers:
        raise InputError(
            f"the plan ({plan.summary()}) has parameter servers, which only `meshwright train` starts: set"
            " gradients.servers to 0"
        )
    reason = why_only_step(plan)
    if reason is not None:
        raise InputError(f"Lightning's loop cannot run the plan ({plan.summary()}): {reason}")

"""The plan that a strategy was given, and which plans Lightning's loops can run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.job import load_plan
from meshwright.plan import Axes, Plan
from meshwright.train.step.own_loop import why_only_step

PlanArgument = (
    Plan | Mapping[str, Any] | str | Path | None
)  # None: every rank is a replica; the text `auto` is a choice
CheckpointFormat = Literal["lightning", "meshwright"]
PRECISIONS: dict[str, Literal["fp32", "bf16"]] = {"32-true": "fp32", "bf16-mixed": "bf16"}


def read_plan(argument: PlanArgument, ranks: int) -> Plan:
    """Returns the plan that a strategy was given, which is not `auto`."""
    if argument is None:
        return Plan(axes=Axes(replicate=ranks))
    return argument if isinstance(argument, Plan) else load_plan(argument, "MeshwrightStrategy")


def with_precision(plan: Plan, flag: str, is_default: bool) -> Plan:
    """Returns the plan with the precision that the user's `precision` flag of Lightning asks for. `is_default`: the
    strategy was given no plan, so the flag decides. Otherwise the flag has to agree with the plan."""
    wanted, planned = PRECISIONS[flag], plan.numerics.precision
    if wanted == planned or wanted == "fp32":  # Lightning's default flag leaves the precision to the plan
        return plan
    if not is_default:
        raise InputError(
            f"precision is {flag}, but the plan says numerics.precision: {planned}: leave precision out, as the plan"
            f" decides it, or write numerics.precision: {wanted} in the plan"
        )
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": wanted})})


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

"""The argument `plan` of a library's trainer, and the library's own option for the precision."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.plan_rules.table import check_rules

# None: every rank is a replica. `auto`: the fastest plan that the library's loop can run. Other texts are paths.
PlanArgument = Plan | Mapping[str, Any] | str | Path | None


def read_plan(argument: PlanArgument, ranks: int, caller: str) -> Plan:
    """Returns the plan that `caller` was given, which is not `auto`."""
    if argument is None:
        return Plan(axes=Axes(replicate=ranks))
    if isinstance(argument, str | Path) and not user_path(str(argument), "plan").exists():
        raise InputError(
            f"{caller}: plan is {str(argument)!r}, and there is no such file: give the path of a plan file, or 'auto'"
        )
    plan = argument if isinstance(argument, Plan) else load_plan(argument, caller)
    check_rules(plan, "library", caller=caller)
    return plan


def with_precision(
    plan: Plan, wanted: Literal["fp32", "tf32", "bf16", "fp16"], option: str, value: object, *, plan_decides: bool
) -> Plan:
    """Returns the plan in the precision that a value of the library's `option` asks for; fp32, the default of such
    options, leaves the precision to the plan. `plan_decides`: the user has written the plan, so the option has to agree
    with it."""
    planned = plan.numerics.precision
    if wanted in ("fp32", planned):
        return plan
    if plan_decides:
        raise InputError(
            f"{option} is {value}, but the plan says numerics.precision: {planned}: leave {option} out, as the plan"
            f" decides it, or write numerics.precision: {wanted} in the plan"
        )
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": wanted})})


def without_accumulation(plan: Plan) -> Plan:
    """Returns a plan that was searched for without accumulation, which the libraries' loops do themselves."""
    return plan.model_copy(update={"memory": plan.memory.model_copy(update={"accumulation": 1})})


def ignoring_accumulation(check: Callable[[Plan], Any]) -> Callable[[Plan], None]:
    """Returns the check of plans for a search whose result `without_accumulation` changes."""
    return lambda plan: check(without_accumulation(plan))

"""Plans that keep constraints. Candidates are proposed with the axes, microbatches and levels that constraints fix
(space.py); all other fixed fields are set in the complete plan (`applied`). Every plan is then checked
(`check_constraints`), together with what the executor checks."""

from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, NONE, Constraints, shown
from meshwright.plan_rules.no_effect import why_without_effect
from meshwright.planner.inputs import PlanningInputs

# Fields that candidates choose. They are set in a plan only where they have no effect in it.
_OF_CANDIDATES = {
    *(name for name in FIELDS if name.startswith("axes.")),
    *("pipeline.schedule", "pipeline.microbatches", "pipeline.cuts", "memory.sharding", "memory.recompute"),
    *("memory.accumulation", "memory.offload", "numerics.precision"),
}


def constrained(inputs: PlanningInputs, constraints: Constraints) -> PlanningInputs:
    """Returns the inputs of a search whose plans keep the constraints."""
    if not constraints:
        return inputs
    check_other = inputs.check_plan

    def check_plan(plan: Plan) -> None:
        check_constraints(plan, constraints)
        check_other(plan)

    offload = constraints.fixed.get("memory.offload", inputs.offload)
    return replace(inputs, constraints=constraints, check_plan=check_plan, offload=offload, check_free_plan=check_other)


def unconstrained(inputs: PlanningInputs) -> PlanningInputs:
    """Returns the inputs of a search without the constraints that `constrained` has added."""
    if inputs.check_free_plan is None:
        return inputs
    return replace(inputs, constraints=NONE, check_plan=inputs.check_free_plan, offload="none", check_free_plan=None)


def check_constraints(plan: Plan, constraints: Constraints) -> None:
    """Raises an `InputError` if the plan does not keep the constraints. Its memory is not checked."""
    for name, value in constraints.fixed.items():
        if _field(plan, name) != value:
            raise InputError(
                f"plan.{name} is {shown(_field(plan, name))} in {plan.summary()}, but it is fixed to {shown(value)}"
            )
    for name, value in constraints.excluded:
        if _field(plan, name) == value:
            raise InputError(f"plan.{name} is {shown(value)} in {plan.summary()}, which is avoided")


def keeps_constraints(plan: Plan, constraints: Constraints) -> bool:
    """Whether the plan keeps the constraints. Its memory is not checked."""
    try:
        check_constraints(plan, constraints)
    except InputError:
        return False
    return True


def applied(plan: Plan, constraints: Constraints) -> Plan:
    """Returns the plan with the values that constraints fix, of all fields that its candidate does not choose. Raises
    an `InputError` if there is no such plan."""
    values = {
        name: value
        for name, value in constraints.fixed.items()
        if _field(plan, name) != value and (name not in _OF_CANDIDATES or _has_no_effect(name, plan))
    }
    values.update(_implied(plan, constraints.fixed))
    if not values:
        return plan
    raw = plan.model_dump()
    for name, value in values.items():
        group, field = name.split(".")
        raw[group][field] = value
    try:
        return Plan.model_validate(raw)
    except ValidationError as error:
        problem = error.errors()[0]
        raise InputError(str(problem.get("ctx", {}).get("error", problem["msg"]))) from None


def bounds_hold(constraints: Constraints) -> bool:
    """Whether the bounds of candidates (bounds.py) are bounds of plans with these constraints, too. They are made for
    plans in which fields that candidates do not choose have their defaults."""
    return all(name in _OF_CANDIDATES or value == FIELDS[name].default for name, value in constraints.fixed.items())


def _has_no_effect(name: str, plan: Plan) -> bool:
    if name == "memory.accumulation":
        return plan.axes.pipeline > 1  # microbatches of a pipeline are another field
    return name in ("memory.sharding", "pipeline.schedule") and why_without_effect(name, plan) is not None


def _implied(plan: Plan, fixed: dict[str, Any]) -> dict[str, Any]:
    """The values of free fields without which the fixed ones cannot be executed."""
    implied: dict[str, Any] = {}
    uses_graphs = fixed.get("compute.cuda_graphs") and plan.world_size > 1
    if uses_graphs and "compute.compile" not in fixed and plan.compute.compile == "none":
        implied["compute.compile"] = "blocks"
    if fixed.get("compute.convolutions") == "nnpack" and "compute.layout" not in fixed:
        implied["compute.layout"] = "contiguous"
    return {name: value for name, value in implied.items() if _field(plan, name) != value}


def _field(plan: Plan, name: str) -> Any:
    group, field = name.split(".")
    return getattr(getattr(plan, group), field)

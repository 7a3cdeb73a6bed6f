"""Fixed fields that have no effect in a plan, each with the reason and what would give it one."""

from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, Constraints
from meshwright.plan_rules.no_effect import NO_EFFECT
from meshwright.plan_rules.rule import first_that_refuses, names_of


def without_effect(plan: Plan, constraints: Constraints) -> dict[str, str]:
    """The fixed fields, with other values than the defaults, that have no effect in this plan, and why."""
    return {
        name: reason
        for name, value in constraints.fix.items()
        if value != FIELDS[name].default and (reason := why_without_effect(name, plan)) is not None
    }


def why_without_effect(name: str, plan: Plan) -> str | None:
    """Why the field has no effect in the plan, and what would give it one; None if it has."""
    names = names_of(plan, {})
    rule = first_that_refuses((NO_EFFECT[name],), names) if name in NO_EFFECT else None
    return rule.message(names) if rule is not None else None

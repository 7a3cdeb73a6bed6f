"""Fixed fields that have no effect in a plan, each with the reason and what would give it one."""

from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, Constraints
from meshwright.plan_rules.no_effect import why_without_effect


def without_effect(plan: Plan, constraints: Constraints) -> dict[str, str]:
    """The fixed fields, with other values than the defaults, that have no effect in this plan, and why."""
    return {
        name: reason
        for name, value in constraints.fix.items()
        if value != FIELDS[name].default and (reason := why_without_effect(name, plan)) is not None
    }

"""The table of rules: what a plan must not combine, and where. Every rule about two fields of a plan, or about a field
and the kind of device or a section of the job, is a row of it. What depends on the model is checked with the model
(parallel/check.py, planner/constraints/contradictions.py)."""

from collections.abc import Set
from functools import cache
from typing import Any

from meshwright.errors import InputError
from meshwright.plan_fields.effects import PlanGroup
from meshwright.plan_rules.compute import COMPILED, COMPUTE
from meshwright.plan_rules.division import DIVISION
from meshwright.plan_rules.doors import DOORS
from meshwright.plan_rules.gradients import GRADIENTS
from meshwright.plan_rules.losses import LOSSES
from meshwright.plan_rules.memory import MEMORY
from meshwright.plan_rules.rule import Rule, first_that_refuses, names_of

RULES = (*DIVISION, *GRADIENTS, *MEMORY, *COMPUTE, *COMPILED, *DOORS, *LOSSES)


def refusal(plan: PlanGroup, where: str, **facts: Any) -> str | None:
    """Returns why the plan is refused there, and what to do instead; None if no rule refuses it."""
    names = names_of(plan, facts)
    rule = first_that_refuses(rules_of(where, frozenset(facts)), names)
    return rule.message(names) if rule is not None else None


@cache
def rules_of(where: str, facts: Set[str] = frozenset()) -> tuple[Rule, ...]:
    """The rules that hold there if these facts are known."""
    return tuple(rule for rule in RULES if where in rule.where and rule.facts <= facts)


def check_rules(plan: PlanGroup, where: str = "run", **facts: Any) -> None:
    """Raises an `InputError` if a rule refuses the plan there."""
    if (reason := refusal(plan, where, **facts)) is not None:
        raise InputError(reason)


def contradiction(plan: PlanGroup, known: Set[str], **facts: Any) -> str | None:
    """Returns why `--fix` can have no plan with the values that the `known` fields have in this one, whatever the
    others are; None if no rule refuses all of them."""
    names = names_of(plan, facts)
    rules = [rule for where in ("plan", "run", "fix") for rule in rules_of(where, frozenset(facts))]
    return next((rule.message(names) for rule in rules if rule.refuses_all(names, known)), None)

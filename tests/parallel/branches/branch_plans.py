"""Plans that place the branches of a model of the zoo on two ranks."""

from typing import Any

from meshwright.plan import Plan

BRANCHES = {"two_tower": {"query": 0, "document": 1}, "multitask": {"classify": 0, "estimate": 1}}


def branch_plan(kind: str, axes: dict[str, int], memory: dict[str, Any] | None = None) -> Plan:
    """Returns the plan that places each branch of this kind of model on a rank of the tensor axis."""
    fields = {"axes": {"tensor": 2, **axes}, "modules": {"branches": BRANCHES[kind]}, "memory": memory or {}}
    return Plan.model_validate(fields)

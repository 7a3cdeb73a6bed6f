"""`Rule`: one row of the table of rules, which says what a plan must not combine. The module does not import torch.

A condition is a Python expression. Its names are the groups of a plan (`axes.shard > 1`), the words of `DERIVED`, and
the `FACTS` that are known besides the plan. Where a fact is not known, rules about it do not hold. Braces in the texts
are expressions with the same names.
"""

import ast
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import cache, cached_property
from types import CodeType
from typing import Any

from meshwright.plan_fields.effects import PlanGroup
from meshwright.plan_fields.groups import GROUPS, STAGES_PER_RANK
from meshwright.plan_fields.shares import describe_shares

DERIVED = {
    "data_ranks": "axes.replicate * axes.shard",
    "world_size": "axes.replicate * axes.shard * axes.context * axes.tensor * axes.pipeline",
    "microbatches": "memory.accumulation * pipeline.microbatches",
    "has_other_axes": "axes.shard > 1 or axes.context > 1 or axes.tensor > 1 or axes.pipeline > 1",
    "stages": "len(pipeline.cuts) + 1",
    "replaces_all_reduce": (
        "['servers'] * (gradients.servers > 0) + ['local_steps'] * (gradients.local_steps > 1)"
        " + ['powersgd_rank'] * (gradients.powersgd_rank > 0)"
    ),
    "over_replicate": (
        "[name for name, split in modules.splits.items() if split.axis == 'replicate' and split.kind != 'none']"
    ),
    "placed": "axes.tensor > 1 and list(modules.branches)",
}
"""Words of conditions, and the expression that each stands for."""
FACTS = {
    "device": "`cpu` or `cuda`",
    "cluster": "the name of the cluster",
    "train": "the section of the job",
    "checkpoint": "the section of the job",
    "loss": "what is known of the loss: whether it is divisible, and its kind",
    "routers": "whether the model adds a load-balancing loss of its routers",
    "partition": "`data.partition` of the job",
    "arguments": "the `TrainingArguments` of transformers",
    "caller": "the class that was given the plan",
}
_FUNCTIONS: dict[str, Any] = {
    "STAGES_PER_RANK": STAGES_PER_RANK,
    "describe": describe_shares,
    "product": lambda axes: " × ".join(f"{name}({size})" for name, size in axes.factors.items()),
    "count": lambda number, noun: f"{number} {noun}{'' if number == 1 else 's'}",
}


@dataclass(frozen=True, eq=False)
class Rule:
    """Where it holds, a plan for which `when` is true is refused, with a reason (`why`) and what to do (`instead`).

    `where`: `plan`, whenever a plan is made; `run`, in searches, in `--fix` and in runs; `fix`, only in `--fix`;
    `compile`, where it is decided what is compiled: nothing, then; or the names of doors.
    """

    when: str
    why: str
    instead: str = ""
    where: tuple[str, ...] = ("run",)

    def refuses_all(self, names: dict[str, Any], known: Set[str]) -> bool:
        """Whether the condition is true whatever values those fields of the plan have that are not `known`."""
        return _truth(_parsed(self.when), names, known) is True

    def message(self, names: dict[str, Any]) -> str:
        text = f"{self.why}: {self.instead}" if self.instead else self.why
        return re.sub(r"\{(.+?)\}", lambda braces: _text(eval(_compiled(braces[1]), names)), text)

    @cached_property
    def fields(self) -> frozenset[str]:
        """The fields of a plan that the condition depends on."""
        return frozenset(_fields(_parsed(self.when)))

    @cached_property
    def facts(self) -> frozenset[str]:
        """The facts that have to be known besides the plan."""
        names = {node.id for node in ast.walk(_parsed(self.when)) if isinstance(node, ast.Name)}
        return frozenset(names & FACTS.keys())


def first_that_refuses(rules: tuple[Rule, ...], names: dict[str, Any]) -> Rule | None:
    """The first rule whose condition is true. All conditions are evaluated as one, because a search asks about
    thousands of plans, most of which no rule refuses."""
    if not eval(_any(rules), names):
        return None
    return next(rule for rule in rules if eval(_compiled(rule.when), names))


@cache
def _any(rules: tuple[Rule, ...]) -> CodeType:
    return _code_of(
        ast.BoolOp(ast.Or(), [_parsed(rule.when) for rule in rules]) if len(rules) > 1 else _parsed(rules[0].when)
    )


def names_of(plan: PlanGroup, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The values of all names that conditions and texts may have."""
    return {**vars(plan), "plan": plan, "cluster": "this machine", **_FUNCTIONS, **facts}


class _Expand(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        return _parsed(DERIVED[node.id]) if node.id in DERIVED else node


@cache
def _parsed(expression: str) -> ast.expr:
    tree: ast.Expression = _Expand().visit(ast.parse(expression, mode="eval"))
    return tree.body


@cache
def _compiled(expression: str) -> CodeType:
    return _code_of(_parsed(expression))


@cache
def _code_of(tree: ast.expr) -> CodeType:
    return compile(ast.fix_missing_locations(ast.Expression(tree)), "<rule>", "eval")


def _truth(tree: ast.expr, names: dict[str, Any], known: Set[str]) -> bool | None:
    """The truth of a condition; None if it depends on fields that are not known."""
    if isinstance(tree, ast.BoolOp):
        decides = isinstance(tree.op, ast.Or)  # one true part of `or`, or one false part of `and`
        parts = []
        for part in tree.values:
            parts.append(_truth(part, names, known))
            if parts[-1] is decides:
                return decides
        return None if None in parts else not decides
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        truth = _truth(tree.operand, names, known)
        return None if truth is None else not truth
    return bool(eval(_code_of(tree), names)) if _fields(tree) <= known else None


def _fields(tree: ast.expr) -> set[str]:
    """The fields of a plan in an expression, such as `axes.shard`."""
    return {
        f"{node.value.id}.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in GROUPS
    }


def _text(value: Any) -> str:
    """A value as it is written in a plan file."""
    return str(value).lower() if isinstance(value, bool) else str(value)

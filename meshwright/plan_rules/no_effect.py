"""Rules about fields that have no effect in a plan: it runs, and an answer names what would give the field one."""

from meshwright.plan_fields.effects import PlanGroup
from meshwright.plan_rules.rule import Rule, first_that_refuses, names_of


def _needs_axis(name: str) -> Rule:
    return Rule(f"axes.{name} == 1", f"which has no {name} axis", f"--fix axes.{name}=N adds one", ("no effect",))


_ONE_DATA_RANK = Rule(
    "data_ranks == 1", "which has one data rank", "--fix axes.replicate=N or axes.shard=N adds more", ("no effect",)
)
NO_EFFECT: dict[str, Rule] = {
    "modules.splits": Rule(
        "axes.tensor == 1 and not (axes.replicate > 1 and over_replicate)",
        "which has no tensor axis",
        "--fix axes.tensor=N adds one",
        ("no effect",),
    ),
    **dict.fromkeys(("modules.sequence", "modules.loss", "modules.branches"), _needs_axis("tensor")),
    "modules.attention_exchange": _needs_axis("context"),
    "pipeline.schedule": _needs_axis("pipeline"),
    "memory.sharding": _needs_axis("shard"),
    **dict.fromkeys(("gradients.algorithm", "gradients.bucket_bytes"), _needs_axis("replicate")),
    **dict.fromkeys(("gradients.precision", "shares.adaptive"), _ONE_DATA_RANK),
    "gradients.local_after": Rule(
        "gradients.local_steps == 1",
        "which takes no local steps",
        "--fix gradients.local_steps=N adds them",
        ("no effect",),
    ),
    "gradients.staleness": Rule(
        "gradients.updates != 'bounded'",
        "whose updates are not bounded",
        "--fix gradients.servers=N --fix gradients.updates=bounded makes them so",
        ("no effect",),
    ),
    "compute.compile_mode": Rule(
        "compute.compile == 'none'",
        "which is not compiled",
        "--fix compute.compile=blocks compiles it",
        ("no effect",),
    ),
}
"""The rule that says when a field has no effect, by the field's name."""


def why_without_effect(name: str, plan: PlanGroup) -> str | None:
    """Why the field has no effect in the plan, and what would give it one; None if it has."""
    names = names_of(plan, {})
    rule = first_that_refuses((NO_EFFECT[name],), names) if name in NO_EFFECT else None
    return rule.message(names) if rule is not None else None

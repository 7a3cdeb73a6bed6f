"""Fixed fields that have no effect in a plan, each with the reason and what would give it one."""

from collections.abc import Callable

from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, Constraints

_Needs = tuple[str, Callable[[Plan], bool]]  # what a field needs, and whether a plan has it


def _axis(name: str) -> _Needs:
    return f"which has no {name} axis: --fix axes.{name}=N adds one", lambda plan: getattr(plan.axes, name) > 1


_TENSOR = _axis("tensor")
_REPLICAS = _axis("replicate")
_SPLITS = (
    "which has no tensor axis: --fix axes.tensor=N adds one",
    lambda plan: (
        plan.axes.tensor > 1
        or (plan.axes.replicate > 1 and any(split.axis == "replicate" for split in plan.modules.splits.values()))
    ),
)
_NEEDS: dict[str, _Needs] = {
    "modules.splits": _SPLITS,
    "modules.sequence": _TENSOR,
    "modules.loss": _TENSOR,
    "modules.branches": _TENSOR,
    "modules.attention_exchange": _axis("context"),
    "pipeline.schedule": _axis("pipeline"),
    "memory.sharding": _axis("shard"),
    "gradients.algorithm": _REPLICAS,
    "gradients.bucket_bytes": _REPLICAS,
    "gradients.precision": (
        "which has one data rank: --fix axes.replicate=N or axes.shard=N adds more",
        lambda plan: plan.axes.replicate * plan.axes.shard > 1,
    ),
    "gradients.local_after": (
        "which takes no local steps: --fix gradients.local_steps=N adds them",
        lambda plan: plan.gradients.local_steps > 1,
    ),
    "gradients.staleness": (
        "whose updates are not bounded: --fix gradients.servers=N --fix gradients.updates=bounded makes them so",
        lambda plan: plan.gradients.updates == "bounded",
    ),
    "compute.compile_mode": (
        "which is not compiled: --fix compute.compile=blocks compiles it",
        lambda plan: plan.compute.compile != "none",
    ),
    "shares.adaptive": (
        "which has one data rank: --fix axes.replicate=N or axes.shard=N adds more",
        lambda plan: plan.axes.replicate * plan.axes.shard > 1,
    ),
}


def without_effect(plan: Plan, constraints: Constraints) -> dict[str, str]:
    """The fixed fields, with other values than the defaults, that have no effect in this plan, and why."""
    return {
        name: _NEEDS[name][0]
        for name, value in constraints.fix.items()
        if name in _NEEDS and value != FIELDS[name].default and not _NEEDS[name][1](plan)
    }

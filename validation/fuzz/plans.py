"""The kinds of plans that cases are drawn from, each a row with its groups, and the models it is for."""

from dataclasses import dataclass, field
from typing import Any

_SEQUENCES = ("tokens", "features")
_ANY = ("tokens", "features", "vectors", "images", "heads", "towers")
_BLOCKS = ("tokens", "features", "vectors", "images")


@dataclass(frozen=True)
class PlanKind:
    """`axes` and `groups` are those of the plan. `models` are the kinds of models it is for, and `stages` the number of
    pipeline stages. `weight`: how often it is drawn. `operators`: one of them has to be in the program."""

    axes: dict[str, int]
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    models: tuple[str, ...] = _ANY
    stages: int = 1
    weight: float = 1.0
    operators: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    batch: int = 12

    @property
    def ranks(self) -> int:
        ranks = 1
        for axis, size in self.axes.items():
            ranks *= 1 if axis == "expert" else size
        return ranks

    @property
    def parts(self) -> int:
        """Into how many parts a batch is divided."""
        data_ranks = self.axes.get("replicate", 1) * self.axes.get("shard", 1)
        accumulation = self.groups.get("memory", {}).get("accumulation", 1)
        return data_ranks * accumulation * self.groups.get("pipeline", {}).get("microbatches", 1)

    def plan(self) -> dict[str, Any]:
        """The groups of the plan, with cuts after the first blocks."""
        groups = {name: dict(values) for name, values in self.groups.items()}
        if self.stages > 1:
            groups["pipeline"]["cuts"] = [f"blocks.{number}" for number in range(self.stages - 1)]
        return {"axes": dict(self.axes), **groups}


def _pipeline(schedule: str, microbatches: int = 2) -> dict[str, dict[str, Any]]:
    return {"pipeline": {"schedule": schedule, "microbatches": microbatches}}


_SEQUENCE = {"modules": {"sequence": True}}
_RING = {"modules": {"attention_exchange": "ring"}}
_EXPERTS = ("experts in a list", "experts stacked")
_TOKEN_LOSSES = ("mean", "sum", "ignored", "smoothed", "sum and count")
_BRANCHES = {"modules": {"branches": {"left": 0, "right": 1}}}

PLANS: dict[str, PlanKind] = {
    "replicate 2": PlanKind({"replicate": 2}),
    "replicate 2 accumulate": PlanKind({"replicate": 2}, {"memory": {"accumulation": 2}}),
    "replicate 2 recompute": PlanKind({"replicate": 2}, {"memory": {"recompute": "full"}}, _BLOCKS, weight=0.5),
    "replicate 2 shares": PlanKind({"replicate": 2}, {"shares": {"samples": [8, 4]}}),
    "replicate 2 synchronized": PlanKind({"replicate": 2}, {"numerics": {"batch_norm": "synchronized"}}),
    "replicate 2 wide": PlanKind(
        {"replicate": 2}, {"modules": {"splits": {"head": {"kind": "column", "axis": "replicate"}}}}, _BLOCKS
    ),
    "replicate 2 chunks": PlanKind(
        {"replicate": 2}, {"compute": {"loss_chunks": 3}}, ("tokens",), losses=_TOKEN_LOSSES
    ),
    "replicate 3": PlanKind({"replicate": 3}, weight=0.7),
    "replicate 3 synchronized": PlanKind({"replicate": 3}, {"numerics": {"batch_norm": "synchronized"}}, weight=0.5),
    "replicate 4": PlanKind({"replicate": 4}, weight=0.5),
    "shard 2": PlanKind({"shard": 2}),
    "shard 2 gradients": PlanKind({"shard": 2}, {"memory": {"sharding": "gradients", "accumulation": 2}}),
    "shard 2 optimizer": PlanKind({"shard": 2}, {"memory": {"sharding": "optimizer"}}),
    "shard 2 recompute": PlanKind({"shard": 2}, {"memory": {"recompute": "selective"}}, _BLOCKS, weight=0.5),
    "shard 2 proportions": PlanKind({"shard": 2}, {"shares": {"shards": [1, 3]}}, weight=0.7),
    "shard 3": PlanKind({"shard": 3}, weight=0.7),
    "replicate 2 shard 2": PlanKind({"replicate": 2, "shard": 2}, weight=0.5),
    "tensor 2": PlanKind({"tensor": 2}, {}, _BLOCKS, weight=2),
    "tensor 2 sequence": PlanKind({"tensor": 2}, _SEQUENCE, _SEQUENCES, weight=3),
    "tensor 2 sequence loss": PlanKind({"tensor": 2}, {"modules": {"sequence": True, "loss": True}}, _SEQUENCES),
    "tensor 2 recompute": PlanKind({"tensor": 2}, {"memory": {"recompute": "full"}}, _BLOCKS),
    "tensor 2 accumulate": PlanKind({"tensor": 2}, {"memory": {"accumulation": 2}}, _BLOCKS, weight=0.5),
    "tensor 4": PlanKind({"tensor": 4}, {}, _BLOCKS, weight=0.5),
    "tensor 4 sequence": PlanKind({"tensor": 4}, _SEQUENCE, _SEQUENCES, weight=0.5),
    "context 2": PlanKind({"context": 2}, {}, _SEQUENCES, weight=3),
    "context 2 ring": PlanKind({"context": 2}, _RING, _SEQUENCES, weight=1.5),
    "context 2 recompute": PlanKind({"context": 2}, {"memory": {"recompute": "full", "accumulation": 2}}, _SEQUENCES),
    "context 3": PlanKind({"context": 3}, {}, _SEQUENCES),
    "context 3 ring": PlanKind({"context": 3}, _RING, _SEQUENCES, weight=0.5),
    "context 2 tensor 2": PlanKind({"context": 2, "tensor": 2}, {}, _SEQUENCES, weight=0.5),
    "context 2 tensor 2 sequence": PlanKind({"context": 2, "tensor": 2}, _SEQUENCE, _SEQUENCES, weight=0.5),
    "replicate 2 context 2": PlanKind({"replicate": 2, "context": 2}, {}, _SEQUENCES, weight=0.5),
    "shard 2 context 2": PlanKind({"shard": 2, "context": 2}, {}, _SEQUENCES, weight=0.5),
    "replicate 2 tensor 2": PlanKind({"replicate": 2, "tensor": 2}, {}, _BLOCKS, weight=0.5),
    "shard 2 tensor 2": PlanKind({"shard": 2, "tensor": 2}, _SEQUENCE, _SEQUENCES, weight=0.5),
    "pipeline 2": PlanKind({"pipeline": 2}, _pipeline("1f1b"), _BLOCKS, 2, weight=2),
    "pipeline 2 gpipe": PlanKind({"pipeline": 2}, _pipeline("gpipe", 3), _BLOCKS, 2),
    "pipeline 2 whole batch": PlanKind({"pipeline": 2}, _pipeline("gpipe", 1), _BLOCKS, 2),
    "pipeline 2 interleaved": PlanKind({"pipeline": 2}, _pipeline("interleaved_1f1b"), _BLOCKS, 4, weight=0.7),
    "pipeline 2 zero bubble": PlanKind({"pipeline": 2}, _pipeline("zero_bubble"), _BLOCKS, 4, weight=0.7),
    "pipeline 2 zbv": PlanKind({"pipeline": 2}, _pipeline("zbv"), _BLOCKS, 4, weight=0.7),
    "pipeline 3": PlanKind({"pipeline": 3}, _pipeline("1f1b", 3), _BLOCKS, 3, weight=0.7),
    "pipeline 4": PlanKind({"pipeline": 4}, _pipeline("1f1b", 4), _BLOCKS, 4, weight=0.5),
    "pipeline 2 replicate 2": PlanKind({"pipeline": 2, "replicate": 2}, _pipeline("1f1b"), _BLOCKS, 2, weight=0.5),
    "pipeline 2 tensor 2": PlanKind({"pipeline": 2, "tensor": 2}, _pipeline("1f1b"), _BLOCKS, 2, weight=0.5),
    "pipeline 2 context 2": PlanKind({"pipeline": 2, "context": 2}, _pipeline("1f1b"), _SEQUENCES, 2, weight=0.5),
    "branches 2": PlanKind({"tensor": 2}, _BRANCHES, ("towers", "heads"), weight=2),
    "replicate 2 expert 2": PlanKind({"replicate": 2, "expert": 2}, {}, ("tokens",), weight=1.5, operators=_EXPERTS),
    "shard 2 expert 2": PlanKind({"shard": 2, "expert": 2}, {}, ("tokens",), operators=_EXPERTS),
    "replicate 2 expert 2 context 2": PlanKind(
        {"replicate": 2, "expert": 2, "context": 2}, {}, ("tokens",), weight=0.4, operators=_EXPERTS
    ),
    "replicate 4 expert 2": PlanKind({"replicate": 4, "expert": 2}, {}, ("tokens",), weight=0.4, operators=_EXPERTS),
}


def axes_of(name: str) -> list[str]:
    """The axes of a kind of plan, as results count them: branches are one, too."""
    return sorted(PLANS[name].axes) + (["branches"] if name.startswith("branches") else [])

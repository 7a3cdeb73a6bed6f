"""What the selftest proves: a table of plans, and where each of them can run.

gpus     a GPU for each rank, over NCCL: what the tests of this package could not try
shared   all ranks on one GPU, over Gloo, which sends no CUDA tensors from rank to rank
cpu      CPU ranks over Gloo
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from meshwright.cluster.selftest_record import plan_parts
from meshwright.plan import Plan
from meshwright.selftest.models import ModelName

Placement = Literal["gpus", "shared", "cpu"]
_TWO_STAGES = ("blocks.1",)
_FOUR_STAGES = ("blocks.0", "blocks.1", "blocks.2")
_SCHEDULES = ("ring", "tree", "halving_doubling")


@dataclass(frozen=True)
class Case:
    """A plan under which a small model is trained and compared with one device. `dtype` is as in a `ProofRequest`."""

    name: str
    plan: Plan
    model: ModelName = "decoder"
    dtype: Literal["fp64", "plan"] = "fp64"

    @property
    def parts(self) -> tuple[str, ...]:
        """What this case proves, as `untested_parts` names it."""
        return plan_parts(self.plan)

    def left_out(self, placement: Placement, devices: int) -> str | None:
        """Why the case cannot run there, or None. `devices` is the number of GPUs; CPU ranks may share cores."""
        plan, ranks = self.plan, self.plan.world_size
        if placement == "gpus" and ranks > devices:
            return f"it needs {ranks} GPUs, and there are {devices}"
        if placement == "cpu" and (plan.compute.cuda_graphs or plan.memory.offload != "none"):
            return "it needs GPUs"
        if placement == "shared" and (plan.axes.pipeline > 1 or plan.gradients.algorithm in _SCHEDULES):
            return "Gloo sends no CUDA tensors from rank to rank: it needs a GPU for each rank"
        return None


def _case(name: str, axes: dict[str, int], dtype: Literal["fp64", "plan"] = "fp64", **groups: Any) -> Case:
    plan = Plan.model_validate({"axes": axes, **groups})
    if plan.axes.expert > 1:
        return Case(name, plan, "mixture", dtype)
    return Case(name, plan, "images" if plan.numerics.batch_norm == "synchronized" else "decoder", dtype)


def _pipeline(ranks: int, schedule: str = "1f1b") -> dict[str, Any]:
    stages = ranks if schedule in ("1f1b", "gpipe") else 2 * ranks
    return {"schedule": schedule, "microbatches": ranks, "cuts": _TWO_STAGES if stages == 2 else _FOUR_STAGES}


def all_cases() -> tuple[Case, ...]:
    """All cases, those with few ranks first."""
    return tuple(sorted(_cases(), key=lambda case: case.plan.world_size))


def _cases() -> Iterator[Case]:
    buckets = {"bucket_bytes": 4000}  # several of them
    yield _case("replicate", {"replicate": 2}, gradients=buckets)
    yield _case("replicate, accumulation", {"replicate": 2}, gradients=buckets, memory={"accumulation": 2})
    for algorithm in _SCHEDULES:
        yield _case(algorithm, {"replicate": 2}, gradients={"algorithm": algorithm, **buckets})
    for sharding in ("optimizer", "gradients", "parameters"):
        yield _case(f"shard, {sharding}", {"shard": 2}, memory={"sharding": sharding})
    yield _case("tensor", {"tensor": 2})
    yield _case("tensor, sequence and loss", {"tensor": 2}, modules={"sequence": True, "loss": True})
    for schedule in ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv"):
        yield _case(f"pipeline, {schedule}", {"pipeline": 2}, pipeline=_pipeline(2, schedule))
    yield _case("synchronized BatchNorm", {"replicate": 2}, numerics={"batch_norm": "synchronized"})
    yield _case("replicate, experts", {"replicate": 2, "expert": 2})
    yield _case("shard, experts", {"shard": 2, "expert": 2})
    for exchange in ("all_gather", "ring"):
        yield _case(f"context, {exchange}", {"context": 2}, modules={"attention_exchange": exchange})
    for precision in ("bf16", "fp16"):
        numerics = {"precision": precision}
        yield _case(f"replicate, {precision}", {"replicate": 2}, "plan", numerics=numerics, gradients=buckets)
        yield _case(f"shard, {precision}", {"shard": 2}, "plan", numerics=numerics)
    for axis in ("replicate", "shard"):
        compute = {"compile": "blocks", "cuda_graphs": True}
        yield _case(f"{axis}, CUDA graphs", {axis: 2}, "plan", compute=compute, numerics={"precision": "bf16"})
    yield _case("replicate, offload optimizer", {"replicate": 2}, memory={"offload": "optimizer"})
    yield _case("shard, offload parameters", {"shard": 2}, memory={"offload": "parameters"})
    yield _case("replicate × shard", {"replicate": 2, "shard": 2})
    yield _case("replicate × tensor", {"replicate": 2, "tensor": 2})
    yield _case("shard × tensor", {"shard": 2, "tensor": 2})
    yield _case("shard × context", {"shard": 2, "context": 2})
    yield _case("context × tensor", {"context": 2, "tensor": 2})
    yield _case("replicate × pipeline", {"replicate": 2, "pipeline": 2}, pipeline=_pipeline(2))
    yield _case("shard × pipeline", {"shard": 2, "pipeline": 2}, pipeline=_pipeline(2))
    yield _case("tensor × pipeline", {"tensor": 2, "pipeline": 2}, pipeline=_pipeline(2))
    yield _case("all axes but shard", {"replicate": 2, "tensor": 2, "pipeline": 2}, pipeline=_pipeline(2))
    yield _case("all axes but replicate", {"shard": 2, "tensor": 2, "pipeline": 2}, pipeline=_pipeline(2))

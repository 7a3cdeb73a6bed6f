"""What to expect of a plan, its step time and its peak memory, without touching a device."""

from dataclasses import dataclass, replace

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.engine import Engine, find_engine
from meshwright.simulator.memory.engine_memory import engine_memory
from meshwright.simulator.memory.peak import CPU_MEMORY, CUDA_MEMORY, DeviceMemory, MemoryPrediction
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.step import predict_step


@dataclass(frozen=True)
class Prediction:
    """`breakdown` has the seconds that add up to `step_s`. `memory_bytes` is the allocated peak of the worst rank;
    `memory` has its parts."""

    step_s: float
    breakdown: dict[str, float]
    memory_bytes: int
    memory: MemoryPrediction
    batch_per_rank: int
    based_on: str
    timeline: Timeline | None = None


def predict_plan(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    optimizer: OptimizerCost,
    *,
    engine: str | Engine = "meshwright",
) -> Prediction:
    """What a plan needs on a cluster that has the devices for it."""
    check_size(plan, cluster, global_batch)
    chosen = find_engine(engine) if isinstance(engine, str) else engine
    memory = plan_memory(cluster, profile, plan, global_batch, optimizer, chosen)
    step = predict_step(cluster, profile, plan, global_batch / plan.shares, optimizer, chosen)
    return Prediction(
        step.step_s,
        step.breakdown,
        memory.allocated_bytes,
        memory,
        _samples(plan, global_batch),
        cluster.based_on,
        step.timeline,
    )


def plan_memory(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, optimizer: OptimizerCost, engine: Engine
) -> MemoryPrediction:
    """The peak of the worst rank alone, for those who want no time."""
    return engine_memory(profile, plan, _samples(plan, global_batch), optimizer, device_memory(cluster), engine)


def _samples(plan: Plan, global_batch: int) -> int:
    """Of the largest microbatch."""
    return -(-global_batch // plan.shares)


def device_memory(cluster: Cluster) -> DeviceMemory:
    """The allocator and libraries of the cluster's kind of device, with the context of its own."""
    if cluster.kind != "cuda":
        return CPU_MEMORY
    context = cluster.nodes[0].device.context_bytes
    return replace(CUDA_MEMORY, context_bytes=context or CUDA_MEMORY.context_bytes)


def check_size(plan: Plan, cluster: Cluster, global_batch: int) -> None:
    if plan.world_size > cluster.devices:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {cluster.devices} devices"
        )
    if global_batch < plan.shares:
        raise InputError(
            f"global_batch is {global_batch}, smaller than the {plan.shares} parts that the plan ({plan.summary()})"
            " makes of it: raise it, or use fewer ranks or microbatches"
        )

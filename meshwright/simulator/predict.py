"""Predicts the step time and the peak memory of a plan, without touching a device.

step     the longest step of all data ranks, because they combine their gradients and so wait for each other
memory   of the rank that needs most or, on machines that are not alike, that fills its device most
"""

from dataclasses import dataclass, replace
from functools import partial

from meshwright.cluster.cluster import Cluster, Device, Node
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.chunked_loss import chunked_profile
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.context import rank_memory_profile, without_context
from meshwright.simulator.data_ranks import DataRankGroup, data_rank_groups, is_divided_unequally
from meshwright.simulator.experts import check_expert_ranks, worst_buffer_bytes
from meshwright.simulator.memory.device_memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory
from meshwright.simulator.memory.peak import MemoryPrediction, rank_memories
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.profile_cache import ProfileCache
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.step import StepTime, predict_step


@dataclass(frozen=True)
class GroupPrediction:
    """The prediction of data ranks that are alike: the `step` that they would take if they waited for no others, and
    the `memory` of each of their pipeline ranks (if ranks hold different branches, of the one that needs most)."""

    group: DataRankGroup
    step: StepTime
    memory: tuple[MemoryPrediction, ...]

    @property
    def fullest(self) -> tuple[MemoryPrediction, Device]:
        """The memory of the rank that fills its device most, and the device."""
        devices = [node.device for node in self.group.nodes]
        return max(zip(self.memory, devices, strict=True), key=_filled)


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan. `breakdown` has the seconds that add up to `step_s`. `memory_bytes` is
    the peak of allocated memory on the rank that needs most, and `memory` says what it consists of. `batch_per_rank` is
    the number of samples in the largest microbatch of a rank. `based_on` is the cluster's basis. `timeline` is None
    without a pipeline. `dispatch_bytes` are the buffers of tokens on their way to experts, which are part of the memory
    with even routing, and what they need at the worst, if all tokens go to one rank; 0 without an expert axis.
    `groups` are the data ranks by device and share, if they are not all alike. The figures are then those of the
    group with the longest step, for which the others wait, and of the rank that fills its device most."""

    step_s: float
    breakdown: dict[str, float]
    memory_bytes: int
    memory: MemoryPrediction
    batch_per_rank: int
    based_on: str
    timeline: Timeline | None = None
    dispatch_bytes: tuple[int, int] = (0, 0)
    groups: tuple[GroupPrediction, ...] = ()

    @property
    def fullest_device(self) -> Device | None:
        """The device whose memory is `memory`; None if all devices are alike."""
        return max((group.fullest for group in self.groups), key=_filled)[1] if self.groups else None


_MEMORIES: ProfileCache[list[MemoryPrediction]] = ProfileCache(1024)


def predict_plan(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    optimizer: OptimizerCost,
    *,
    runtime: Runtime = OUR_RUNTIME,
) -> Prediction:
    """The prediction of a plan on a cluster; raises `InputError` if the cluster has too few devices for the plan, or
    the batch too few samples."""
    check_size(plan, cluster, global_batch)
    check_expert_ranks(profile, plan)
    groups: tuple[GroupPrediction, ...] = ()
    samples = _microbatch_samples(plan, global_batch)
    if is_divided_unequally(cluster, plan):
        groups = _predict_groups(cluster, profile, plan, global_batch, optimizer, runtime)
        step = max((group.step for group in groups), key=lambda step: step.step_s)
        memory, _ = max((group.fullest for group in groups), key=_filled)
        samples = max(group.group.microbatch_samples(plan) for group in groups)
    else:
        memory = plan_memory(cluster, profile, plan, global_batch, optimizer, runtime)
        step = predict_step(cluster, profile, plan, _mean_samples(plan, global_batch), optimizer, runtime)
    even, worst = (0.0, 0.0)
    if plan.axes.expert > 1:
        even, worst = worst_buffer_bytes(profile, plan, samples / plan.axes.context)
    return Prediction(
        step.step_s,
        step.breakdown,
        memory.allocated_bytes,
        memory,
        samples,
        cluster.basis,
        step.timeline,
        (round(even), round(worst)),
        groups,
    )


def plan_step_s(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    global_batch: int,
    optimizer: OptimizerCost,
    *,
    runtime: Runtime = OUR_RUNTIME,
) -> float:
    """The seconds of a step that `predict_plan` returns, without the memory, whose prediction takes longer."""
    check_size(plan, cluster, global_batch)
    check_expert_ranks(profile, plan)
    if not is_divided_unequally(cluster, plan):
        return predict_step(cluster, profile, plan, _mean_samples(plan, global_batch), optimizer, runtime).step_s
    groups = data_rank_groups(cluster, plan, global_batch)
    return max(group_step(cluster, profile, plan, group, optimizer, runtime).step_s for group in groups)


def _predict_groups(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, optimizer: OptimizerCost, runtime: Runtime
) -> tuple[GroupPrediction, ...]:
    known: dict[tuple[int, float | None], tuple[MemoryPrediction, ...]] = {}
    groups = []
    for group in data_rank_groups(cluster, plan, global_batch):
        key = group.microbatch_samples(plan), group.shard_part
        if key not in known:
            known[key] = _memory_of_ranks(cluster, profile, plan, *key, optimizer, runtime)
        memory = _on_devices(known[key], group)
        groups.append(GroupPrediction(group, group_step(cluster, profile, plan, group, optimizer, runtime), memory))
    return tuple(groups)


def _filled(used: tuple[MemoryPrediction, Device]) -> float:
    memory, device = used
    return memory.device_bytes / max(1, device.memory_bytes)


def group_step(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    group: DataRankGroup,
    optimizer: OptimizerCost,
    runtime: Runtime = OUR_RUNTIME,
) -> StepTime:
    """The step that data ranks which are alike take if they wait for no others."""
    samples = group.mean_microbatch_samples(plan)
    return predict_step(cluster, profile, plan, samples, optimizer, runtime, group.nodes, group.shard_part)


def group_memory(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    group: DataRankGroup,
    optimizer: OptimizerCost,
    runtime: Runtime = OUR_RUNTIME,
) -> tuple[MemoryPrediction, ...]:
    """The peak memory of each pipeline rank of data ranks that are alike; if branches are placed, of the rank with
    most."""
    samples, part = group.microbatch_samples(plan), group.shard_part
    return _on_devices(_memory_of_ranks(cluster, profile, plan, samples, part, optimizer, runtime), group)


def _memory_of_ranks(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    samples: int,
    shard_part: float | None,
    optimizer: OptimizerCost,
    runtime: Runtime,
) -> tuple[MemoryPrediction, ...]:
    """The peak memory of each pipeline rank; if branches are placed, of the rank with most."""
    ranks = _rank_memories(cluster, profile, plan, samples, optimizer, runtime, shard_part)
    if len(ranks) != plan.axes.pipeline:
        ranks = [max(ranks, key=lambda memory: memory.allocated_bytes)]
    return tuple(ranks)


def _on_devices(ranks: tuple[MemoryPrediction, ...], group: DataRankGroup) -> tuple[MemoryPrediction, ...]:
    """The memory of pipeline ranks with the context of their own devices."""
    return tuple(
        replace(memory, device_bytes=memory.reserved_bytes + _context_bytes(node))
        for memory, node in zip(ranks, group.nodes, strict=True)
    )


def plan_memory(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, optimizer: OptimizerCost, runtime: Runtime
) -> MemoryPrediction:
    """The peak memory of the rank that needs most or, on machines that are not alike, that fills its device most. Time
    is not predicted."""
    memories = memory_by_device(cluster, profile, plan, global_batch, optimizer, runtime)
    return max(memories, key=_filled)[0]


def memory_by_device(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, optimizer: OptimizerCost, runtime: Runtime
) -> list[tuple[MemoryPrediction, Device]]:
    """The peak memory of ranks with their devices: of the rank that needs most or, on machines that are not alike, of
    one rank of each kind. Time is not predicted."""
    if is_divided_unequally(cluster, plan):
        return [
            (memory, node.device)
            for group in data_rank_groups(cluster, plan, global_batch)
            for memory, node in zip(
                group_memory(cluster, profile, plan, group, optimizer, runtime), group.nodes, strict=True
            )
        ]
    samples = _microbatch_samples(plan, global_batch)
    ranks = _rank_memories(cluster, profile, plan, samples, optimizer, runtime)
    return [(max(ranks, key=lambda memory: memory.allocated_bytes), cluster.nodes[0].device)]


def _rank_memories(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    samples: int,
    optimizer: OptimizerCost,
    runtime: Runtime,
    shard_part: float | None = None,
) -> list[MemoryPrediction]:
    """The peak memory of each pipeline rank, or rank with other branches, with `samples` in a microbatch and, if it is
    given, `shard_part` of what the shard axis divides. It does not depend on how ranks combine gradients, or on how
    fast devices and links are."""
    device = device_memory(cluster, runtime.checkpoint_copies)
    groups = plan.model_dump_json(exclude={"gradients"})
    key = (groups, samples, optimizer, runtime, device, shard_part)
    make = partial(_predict_rank_memories, device, profile, plan, samples, optimizer, runtime, shard_part)
    return _MEMORIES.get(profile, key, make)


def _predict_rank_memories(
    device: DeviceMemory,
    profile: ModelProfile,
    plan: Plan,
    samples: int,
    optimizer: OptimizerCost,
    runtime: Runtime,
    shard_part: float | None,
) -> list[MemoryPrediction]:
    rank_samples = samples / plan.axes.context
    profile = chunked_profile(rank_memory_profile(profile, plan), plan.compute.loss_chunks)
    profile = compiled_profile(profile, plan, rank_samples)
    optimizer = optimizer.fused() if plan.compute.fused_optimizer else optimizer
    inputs = runtime.memory_inputs(profile, plan, optimizer, device)
    return rank_memories(
        inputs.profile, without_context(plan), rank_samples, inputs.optimizer, inputs.device, shard_part
    )


def _microbatch_samples(plan: Plan, global_batch: int) -> int:
    """The number of samples in the largest microbatch of a rank."""
    return -(-global_batch // plan.batch_parts)


def device_memory(cluster: Cluster, checkpoint_copies: bool = False) -> DeviceMemory:
    """The memory properties of the cluster's kind of device. `context_bytes` is that of the cluster's first device if
    it is known."""
    if cluster.kind != "cuda":
        return CPU_MEMORY.with_checkpoint_copies(checkpoint_copies)
    context = _context_bytes(cluster.nodes[0])
    return replace(CUDA_MEMORY, context_bytes=context).with_checkpoint_copies(checkpoint_copies)


def _context_bytes(node: Node) -> int:
    if node.device.kind != "cuda":
        return CPU_MEMORY.context_bytes
    return node.device.context_bytes or CUDA_MEMORY.context_bytes


def _mean_samples(plan: Plan, global_batch: int) -> float:
    """The mean number of samples in a microbatch of the rank with most samples, for which the others wait."""
    return -(-global_batch // plan.data_ranks) / plan.microbatches


def check_size(plan: Plan, cluster: Cluster, global_batch: int) -> None:
    """Raises InputError where the cluster has too few devices for the plan, or the batch too few samples."""
    if plan.world_size > cluster.device_count:
        raise InputError(
            f"the plan ({plan.summary()}) is for {plan.world_size} ranks, but the cluster '{cluster.name}' has"
            f" {cluster.device_count} devices"
        )
    if global_batch < plan.batch_parts:
        raise InputError(
            f"global_batch is {global_batch}, smaller than the {plan.batch_parts} parts that the plan"
            f" ({plan.summary()}) makes of it: raise it, or use fewer ranks or microbatches"
        )

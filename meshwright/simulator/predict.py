"""Predicts the step time and the peak memory of a plan, without touching a device."""

from dataclasses import dataclass, replace

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.chunked_loss import chunked_profile
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.context import context_exchange, exchanged_bytes, with_divided_tables, without_context
from meshwright.simulator.experts import check_expert_ranks, worst_buffer_bytes
from meshwright.simulator.memory.device_memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory
from meshwright.simulator.memory.peak import MemoryPrediction, predict_memory
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.step import predict_step
from meshwright.simulator.tensor.split_profile import split_profile


@dataclass(frozen=True)
class Prediction:
    """The predicted time and memory of a plan. `breakdown` has the seconds that add up to `step_s`. `memory_bytes` is
    the peak of allocated memory on the rank that needs most, and `memory` says what it consists of. `batch_per_rank` is
    the number of samples in the largest microbatch of a rank. `based_on` is that of the cluster. `timeline` is None
    without a pipeline. `dispatch_bytes` are the buffers of tokens on their way to experts, which are part of the memory
    with even routing, and what they need at the worst, if all tokens go to one rank; 0 without an expert axis."""

    step_s: float
    breakdown: dict[str, float]
    memory_bytes: int
    memory: MemoryPrediction
    batch_per_rank: int
    based_on: str
    timeline: Timeline | None = None
    dispatch_bytes: tuple[int, int] = (0, 0)


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
    memory = plan_memory(cluster, profile, plan, global_batch, optimizer, runtime)
    step = predict_step(cluster, profile, plan, global_batch / plan.batch_parts, optimizer, runtime)
    even, worst = (0.0, 0.0)
    if plan.axes.expert > 1:
        samples = _microbatch_samples(plan, global_batch) / plan.axes.context
        even, worst = worst_buffer_bytes(profile, plan, samples)
    return Prediction(
        step.step_s,
        step.breakdown,
        memory.allocated_bytes,
        memory,
        _microbatch_samples(plan, global_batch),
        cluster.based_on,
        step.timeline,
        (round(even), round(worst)),
    )


def plan_memory(
    cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int, optimizer: OptimizerCost, runtime: Runtime
) -> MemoryPrediction:
    """The peak memory of the rank that needs most. Time is not predicted."""
    samples = _microbatch_samples(plan, global_batch) / plan.axes.context
    profile = chunked_profile(with_divided_tables(profile, plan), plan.compute.loss_chunks)
    profile = compiled_profile(profile, plan, samples)
    optimizer = optimizer.fused() if plan.compute.fused_optimizer else optimizer
    device = device_memory(cluster, runtime.checkpoint_copies)
    inputs = runtime.memory_inputs(profile, plan, optimizer, device)
    rank = predict_memory(inputs.profile, without_context(plan), samples, inputs.optimizer, inputs.device)
    exchange = context_exchange(cluster, profile.structure, plan)
    if exchange is None:
        return rank
    local = split_profile(inputs.profile, plan)
    return rank.with_temporary(round(exchanged_bytes(local, plan, samples, exchange.key_value_share)))


def _microbatch_samples(plan: Plan, global_batch: int) -> int:
    """The number of samples in the largest microbatch of a rank."""
    return -(-global_batch // plan.batch_parts)


def device_memory(cluster: Cluster, checkpoint_copies: bool = False) -> DeviceMemory:
    """The memory properties of the cluster's kind of device. `context_bytes` is that of the cluster's first device if
    it is known."""
    if cluster.kind != "cuda":
        return CPU_MEMORY.with_checkpoint_copies(checkpoint_copies)
    context = cluster.nodes[0].device.context_bytes or CUDA_MEMORY.context_bytes
    return replace(CUDA_MEMORY, context_bytes=context).with_checkpoint_copies(checkpoint_copies)


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

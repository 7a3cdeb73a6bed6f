"""`predict`: what to expect of a plan, its time and its memory, without touching a device."""

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find
from meshwright.errors import InputError
from meshwright.plan import Axes, Plan
from meshwright.profile.measured import profile_or_measure
from meshwright.profile.optimizer import OptimizerCost, optimizer_cost
from meshwright.profile.step import LossFunction
from meshwright.profile.values import ModelProfile
from meshwright.simulator.engine import Engine, find_engine
from meshwright.simulator.engine_memory import engine_memory
from meshwright.simulator.memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory, MemoryPrediction
from meshwright.simulator.own_shapes import with_own_shapes
from meshwright.simulator.step import predict_step
from meshwright.simulator.timeline import Timeline


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
    _check(plan, cluster, global_batch)
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


def predict(
    model: nn.Module,
    sample_batch: Any,
    *,
    global_batch: int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | None = None,
    cluster: str | Cluster = "local",
    target: str | None = None,
) -> Prediction:
    """What training this model needs. The model and the batch may lie on the meta device; a model whose shapes depend
    on its data is run for a step where it lies. `optimizer` is a template, plain SGD where it is left out; without a
    plan every device is a replica."""
    found = find(cluster) if isinstance(cluster, str) else cluster
    chosen = plan or Plan(axes=Axes(replicate=min(found.devices, global_batch)))
    _check(chosen, found, global_batch)
    on_gpu = found.kind == "cuda"
    traced, how = profile_or_measure(
        model,
        sample_batch,
        loss,
        precision=chosen.numerics.precision,
        on_gpu=on_gpu,
        target=target,
        recompute=chosen.memory.recompute,
        structured=chosen.axes.tensor * chosen.axes.pipeline > 1 or bool(chosen.modules.splits),
    )
    found = with_own_shapes(found, traced, chosen, global_batch)
    predicted = predict_plan(found, traced, chosen, global_batch, cost_of(optimizer, on_gpu))
    return replace(predicted, based_on=f"{found.based_on}; {how}")


def device_memory(cluster: Cluster) -> DeviceMemory:
    """The allocator and libraries of the cluster's kind of device, with the context of its own."""
    if cluster.kind != "cuda":
        return CPU_MEMORY
    context = cluster.nodes[0].device.context_bytes
    return replace(CUDA_MEMORY, context_bytes=context or CUDA_MEMORY.context_bytes)


def _check(plan: Plan, cluster: Cluster, global_batch: int) -> None:
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


def cost_of(template: torch.optim.Optimizer | None, on_gpu: bool) -> OptimizerCost:
    if template is None:
        return OptimizerCost(state=0.0, temporary=0.0, at_once=False)
    kind = type(template)
    known = inspect.signature(kind).parameters
    options = {k: v for k, v in template.param_groups[0].items() if k in known and k != "params"}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    return optimizer_cost(make, at_once=on_gpu and options.get("foreach") is not False)

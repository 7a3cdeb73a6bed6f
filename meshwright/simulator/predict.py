"""`predict`: what to expect of a plan, without touching a device. So far its memory; its time comes with the rest."""

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
from meshwright.simulator.memory import CPU_MEMORY, CUDA_MEMORY, DeviceMemory, MemoryPrediction, predict_memory


@dataclass(frozen=True)
class Prediction:
    """`memory_bytes` is the allocated peak of the worst rank; `memory` has its parts."""

    memory_bytes: int
    memory: MemoryPrediction
    batch_per_rank: int
    based_on: str


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
    batch = -(-global_batch // chosen.shares)
    memory = predict_memory(traced, chosen, batch, _cost(optimizer, on_gpu), device_memory(found))
    return Prediction(memory.allocated_bytes, memory, batch, f"{found.based_on}; {how}")


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


def _cost(template: torch.optim.Optimizer | None, on_gpu: bool) -> OptimizerCost:
    if template is None:
        return OptimizerCost(state=0.0, temporary=0.0, at_once=False)
    kind = type(template)
    known = inspect.signature(kind).parameters
    options = {k: v for k, v in template.param_groups[0].items() if k in known and k != "params"}

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return kind(parameters, **options)

    return optimizer_cost(make, at_once=on_gpu and options.get("foreach") is not False)

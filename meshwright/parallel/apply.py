"""A plan put on a model, step by step. It decides nothing that the plan does not say."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.blocks.recompute import recompute_blocks
from meshwright.collectives.reducers import make_reducer
from meshwright.collectives.sums import Sums, make_sums
from meshwright.errors import InputError
from meshwright.parallel.branches.branches import connect, recompute_apart, set_apart
from meshwright.parallel.branches.check import apart, beside_branches, check_branches
from meshwright.parallel.check import check_cast, check_runnable, check_structure, needs_structure
from meshwright.parallel.compiled import compile_blocks
from meshwright.parallel.float8 import eight_bits
from meshwright.parallel.mesh import build_mesh, data_group, place_in
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.pipeline.pipeline import Pipeline
from meshwright.parallel.pipeline.stages import cut_stages, recompute_stages
from meshwright.parallel.precision import travelling_dtype
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from meshwright.parallel.replicate.combine import Combiner, combine
from meshwright.parallel.replicate.local_steps import LocalSteps
from meshwright.parallel.replicate.replicate import replicate
from meshwright.parallel.shard import shard
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import Layout
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import record_flow
from meshwright.profile.structure.structure import Structure, structure

T = TypeVar("T")
Fill = Callable[[nn.Module, Mapping[str, Layout]], None]


def apply(
    plan: Plan,
    module: nn.Module,
    device: torch.device,
    world_size: int,
    sample: Any = None,
    target: str | None = None,
    fill: Fill | None = None,
) -> ParallelModel:
    """`sample` is a batch as the model gets it: a plan that splits or cuts the model learns from it how that can be.
    `fill` gives a module that lies on the meta device, and its parts as the layouts say, memory and initial weights."""
    check_runnable(plan)
    check_cast(plan, module)
    mesh = build_mesh(plan, device.type, world_size)
    place = place_in(mesh, plan)
    found = _structure(plan, module, sample, target)
    order = tuple(module.state_dict())
    # Stages first: what another rank runs is not even moved to this one's device.
    cutting = (
        cut_stages(module, plan, _known(found), place.pipeline, sample, target) if plan.axes.pipeline > 1 else None
    )
    # Branches too; their layouts are known on the ranks that do not hold them.
    branches = set_apart(module, plan, _known(mesh), device) if apart(plan) else None
    held = cutting.module if cutting else module
    runs = [stage.model for stage in cutting.stages] if cutting else [module]
    for each in (held, *runs):
        if fill is None:
            _move(each, plan, device)
    # Splits before all that wraps: whatever comes later sees a rank's part of a weight as an ordinary one.
    layouts: dict[str, Layout] = dict(branches.layouts) if branches else {}
    if found and mesh:
        layouts |= split_modules(runs, plan, found, mesh)
    for each in runs:
        if plan.numerics.batch_norm == "synchronized" and (others := data_group(mesh, plan)) is not None:
            synchronize_batch_norm(each, others)
    # Before DDP and FSDP2: they look for the parameters that a whole forward pass, with all its blocks, has used.
    if cutting:
        recompute_stages(cutting, plan.memory.recompute)
    elif branches:
        recompute_apart(branches, module, plan.memory.recompute)
    else:
        recompute_blocks(module, plan.memory.recompute)
    if plan.numerics.precision == "fp8":
        eight_bits(module, device)
    compile_blocks(held, plan, device)
    sums = _sums(plan, device) if world_size > 1 else None
    if sums is not None:
        weakref.finalize(held, sums.close)
    runner, combiner = held, None
    if fill is not None and plan.axes.shard == 1:
        fill(held, layouts)
    if plan.axes.shard > 1:
        # PyTorch's pipeline looks for FSDP2 on what it calls itself, the stage. Blocks that chance or data may leave
        # out are gathered with all the rest, since ranks have to gather in one order.
        for each in cutting.stages if cutting else [module]:
            shard(each, _known(mesh), plan, units=not (found and found.evaluated))
        if fill is not None:  # what is still to be divided would be filled whole
            fill(held, layouts)
    elif plan.axes.replicate > 1:
        runner, combiner = _replicated(plan, held, _known(mesh), layouts, _known(sums), device)
    if branches:
        connect(branches, module)
    local = None
    if plan.gradients.local_steps > 1 and isinstance(runner, DistributedDataParallel):
        local = LocalSteps(runner, _known(mesh).get_group("replicate"), plan)
    pipeline = Pipeline(cutting, plan, _known(mesh), device) if cutting else None
    tied = cutting.tied if cutting else ()
    return ParallelModel(plan, held, runner, mesh, place, device, order, layouts, tied, pipeline, combiner, local, sums)


def _sums(plan: Plan, device: torch.device) -> Sums:
    """In shared memory a sum ends with all ranks, and the stages of a pipeline ask for it at different times: the last
    one before its backward pass, which the others wait for."""
    assert dist.group.WORLD is not None
    return make_sums("native" if plan.axes.pipeline > 1 else plan.gradients.algorithm, dist.group.WORLD, device)


def _replicated(
    plan: Plan, module: nn.Module, mesh: DeviceMesh, layouts: dict[str, Layout], sums: Sums, device: torch.device
) -> tuple[nn.Module, Combiner | None]:
    """DDP where the replicate axis is alone. Beside another one its ranks hold parts of models, which DDP would take
    apart otherwise on each of them; gradients are averaged by us then."""
    divided = [name for name, layout in layouts.items() if layout.axis == "replicate"]
    size = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    own_way = plan.gradients.powersgd_rank > 0 or plan.gradients.local_steps > 1  # torch's hooks go to the backend
    algorithm = "native" if own_way else plan.gradients.algorithm
    reducer, why = make_reducer(algorithm, mesh.get_group("replicate"), device, size)
    if why and mesh.get_rank() == 0:
        warnings.warn(f"{why}: they go through the backend", stacklevel=2)
    if plan.world_size == plan.axes.replicate:
        return replicate(module, mesh, plan, reducer, divided, sums), None
    return module, combine(
        module,
        reducer,
        plan.gradients.bucket_bytes,
        divided,
        overlap=plan.axes.pipeline == 1,
        travelling=travelling_dtype(plan),
    )


def _move(module: nn.Module, plan: Plan, device: torch.device) -> None:
    module.to(device)
    if plan.compute.layout == "channels_last":
        # Before wrapping: DDP's buckets take the strides that the parameters have then.
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _structure(plan: Plan, module: nn.Module, sample: Any, target: str | None) -> Structure | None:
    if not needs_structure(plan):
        return None
    if sample is None:
        raise InputError(
            f"the plan ({plan.summary()}) divides the model, and how it can be divided is learnt from a batch:"
            " give parallelize(…, sample_batch=batch)"
        )
    found = structure(module, sample, target=target)
    check_branches(plan, module, lambda: record_flow(module, sample, 2, target=target, evaluating=found.evaluated))
    check_structure(plan, module, found)
    return beside_branches(found, plan)


def _known(value: T | None) -> T:
    assert value is not None, "an axis larger than one makes a mesh, and a split or a cut wants a structure"
    return value

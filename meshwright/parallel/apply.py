"""Applies a plan to a model, step by step. Every choice is the plan's; this file only says in which order.

`apply` reads as a list: one line for each step, which calls one file, with a comment on why it comes at this point.
"""

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
from meshwright.collectives.small_sums import SmallSums, make_small_sums
from meshwright.errors import InputError
from meshwright.parallel.branches.branches import (
    AssignedBranches,
    assign_branches,
    connect_branches,
    recompute_branch_blocks,
)
from meshwright.parallel.branches.check import check_branches, has_assigned_branches, without_branch_splits
from meshwright.parallel.check import check_cast, check_runnable, check_structure, needs_structure
from meshwright.parallel.compiled import compile_blocks
from meshwright.parallel.float8 import convert_linears_to_float8
from meshwright.parallel.mesh import build_mesh, data_group, position_in_mesh
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.pipeline.pipeline import PipelineExecutor
from meshwright.parallel.pipeline.stages import LocalStages, cut_stages, recompute_stages
from meshwright.parallel.precision import gradient_reduce_dtype
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from meshwright.parallel.replicate.gradient_averaging import GradientAverager, gradient_averager
from meshwright.parallel.replicate.local_steps import LocalSteps
from meshwright.parallel.replicate.replicate import replicate
from meshwright.parallel.shard import shard
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import ParameterLayout
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import Dataflow, record_dataflow
from meshwright.profile.structure.structure import Structure, find_structure

T = TypeVar("T")
FillWeights = Callable[[nn.Module, Mapping[str, ParameterLayout]], None]


def apply(
    plan: Plan,
    module: nn.Module,
    device: torch.device,
    world_size: int,
    sample: Any = None,
    target: str | None = None,
    fill: FillWeights | None = None,
) -> ParallelModel:
    """Applies the plan to the module, in place, and returns what this rank has of it.

    `sample` is a batch as the model gets it. A plan that splits the model or cuts it into stages needs it, to find out
    how the model can be split. `fill` allocates and initializes the weights of a module that is on the meta device, as
    the given layouts say; without it the module has its weights already.
    """
    # A plan that cannot run is refused before anything is changed.
    check_runnable(plan)
    check_cast(plan, module)
    # The mesh before all else: every later step communicates over one of its axes.
    mesh = build_mesh(plan, device.type, world_size)
    position = position_in_mesh(mesh, plan)
    structure = _checked_structure(plan, module, sample, target)
    state_names = tuple(module.state_dict())
    # Pipeline stages first, so that modules of other stages are not even moved to this rank's device.
    stages = (
        cut_stages(module, plan, _required(structure), position.pipeline, sample, target)
        if plan.axes.pipeline > 1
        else None
    )
    # Branches next, for the same reason. Their layouts are known on the ranks that do not hold them too.
    branches = assign_branches(module, plan, _required(mesh), device) if has_assigned_branches(plan) else None
    local_module = stages.module if stages else module
    models = [stage.model for stage in stages.stages] if stages else [module]
    # To the device before splitting and wrapping: DDP's buckets take the strides that parameters have when it wraps.
    if fill is None:
        for model in (local_module, *models):
            _move(model, plan, device)
    # Tensor splits before everything that wraps: later steps see the shard of a weight as an ordinary parameter.
    layouts: dict[str, ParameterLayout] = dict(branches.layouts) if branches else {}
    if structure and mesh:
        layouts |= split_modules(models, plan, structure, mesh)
    # Synchronized BatchNorm replaces the forward pass of layers before recomputing wraps that of the blocks.
    if plan.numerics.batch_norm == "synchronized" and (group := data_group(mesh, plan)) is not None:
        for model in models:
            synchronize_batch_norm(model, group)
    # Recomputing before DDP and FSDP2: these look for the parameters that the forward pass of whole blocks has used.
    _recompute(plan, module, stages, branches)
    # fp8 before compiling, so that the casts are compiled together with the layers.
    if plan.numerics.precision == "fp8":
        convert_linears_to_float8(module, device)
    # Compiling before DDP and FSDP2, so that their hooks stay outside of the compiled code.
    compile_blocks(local_module, plan, device)
    sums = _small_sums(plan, device, local_module) if world_size > 1 else None
    # Shard or replicate last, because both take hold of the parameters as they are now. Weights are filled before they
    # are replicated, but after they are sharded: before, each rank would allocate them in full.
    runner, averager = local_module, None
    if fill is not None and plan.axes.shard == 1:
        fill(local_module, layouts)
    if plan.axes.shard > 1:
        # PyTorch's pipeline looks for FSDP2 on the module that it calls, the stage. If random numbers or data decide
        # which blocks run, the model is one unit, because all ranks have to gather in the same order.
        for model in stages.stages if stages else [module]:
            shard(model, _required(mesh), plan, per_block=not (structure and structure.found_in_evaluation))
        if fill is not None:
            fill(local_module, layouts)
    elif plan.axes.replicate > 1:
        runner, averager = _replicate(plan, local_module, _required(mesh), layouts, _required(sums), device)
    # The hooks of branches after all others, so that branches exchange tensors outside of these.
    if branches:
        connect_branches(branches, module)
    # What runs steps in another way than calling the runner.
    local_steps = None
    if plan.gradients.local_steps > 1 and isinstance(runner, DistributedDataParallel):
        local_steps = LocalSteps(runner, _required(mesh).get_group("replicate"), plan)
    pipeline = PipelineExecutor(stages, plan, _required(mesh), device) if stages else None
    return ParallelModel(
        plan,
        local_module,
        runner,
        mesh,
        position,
        device,
        state_names,
        layouts,
        stages.tied if stages else (),
        pipeline,
        averager,
        local_steps,
        sums,
    )


def _recompute(plan: Plan, module: nn.Module, stages: LocalStages | None, branches: AssignedBranches | None) -> None:
    if stages:
        recompute_stages(stages, plan.memory.recompute)
    elif branches:
        recompute_branch_blocks(branches, module, plan.memory.recompute)
    else:
        recompute_blocks(module, plan.memory.recompute)


def _small_sums(plan: Plan, device: torch.device, module: nn.Module) -> SmallSums:
    """Sums of a few numbers over all ranks, closed together with the module.

    A pipeline uses the backend. Sums in shared memory need all ranks at the same time, but the last stage asks for one
    before its backward pass, which the other stages wait for.
    """
    assert dist.group.WORLD is not None
    algorithm = "native" if plan.axes.pipeline > 1 else plan.gradients.algorithm
    sums = make_small_sums(algorithm, dist.group.WORLD, device)
    weakref.finalize(module, sums.close)
    return sums


def _replicate(
    plan: Plan,
    module: nn.Module,
    mesh: DeviceMesh,
    layouts: dict[str, ParameterLayout],
    sums: SmallSums,
    device: torch.device,
) -> tuple[nn.Module, GradientAverager | None]:
    """Returns the module that is called in training, and what averages its gradients.

    If the replicate axis is the only one, that is DDP and None. Otherwise each rank of the mesh holds different
    parameters, for which DDP would form different buckets; then it is the module itself and a `GradientAverager`.
    """
    split_names = [name for name, layout in layouts.items() if layout.axis == "replicate"]
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    # PowerSGD and local steps are torch's communication hooks, which always use the backend.
    uses_torch_hook = plan.gradients.powersgd_rank > 0 or plan.gradients.local_steps > 1
    algorithm = "native" if uses_torch_hook else plan.gradients.algorithm
    reducer, reason = make_reducer(algorithm, mesh.get_group("replicate"), device, gradient_bytes)
    if reason and mesh.get_rank() == 0:
        warnings.warn(f"{reason}: they go through the backend", stacklevel=2)
    if plan.world_size == plan.axes.replicate:
        return replicate(module, mesh, plan, reducer, split_names, sums), None
    return module, gradient_averager(
        module,
        reducer,
        plan.gradients.bucket_bytes,
        split_names,
        overlap=plan.axes.pipeline == 1,
        reduce_dtype=gradient_reduce_dtype(plan),
    )


def _move(module: nn.Module, plan: Plan, device: torch.device) -> None:
    module.to(device)
    if plan.compute.layout == "channels_last":
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _checked_structure(plan: Plan, module: nn.Module, sample: Any, target: str | None) -> Structure | None:
    """How the model can be split and cut. None if the plan does neither."""
    if not needs_structure(plan):
        return None
    if sample is None:
        raise InputError(
            f"the plan ({plan.summary()}) divides the model, and a batch is needed to find out how it can be divided:"
            " give parallelize(…, sample_batch=batch)"
        )
    structure = find_structure(module, sample, target=target)

    def record() -> Dataflow:
        return record_dataflow(module, sample, 2, target=target, evaluating=structure.found_in_evaluation)

    check_branches(plan, module, record)
    check_structure(plan, module, structure)
    return without_branch_splits(structure, plan)


def _required(value: T | None) -> T:
    assert value is not None, "a plan with an axis larger than one has a mesh, and one that splits or cuts a structure"
    return value

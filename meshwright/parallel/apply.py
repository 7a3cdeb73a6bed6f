"""Applies a plan to a model, step by step. Every choice is made by the plan; this file only fixes the order of the
steps.

`apply` and the functions of this file that it calls read as a list: one line for each step, which calls one file, with
a comment on why the step comes at this point.
"""

import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshwright.blocks.convolutions import use_nnpack
from meshwright.blocks.image_layout import channels_last_format
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
from meshwright.parallel.check import (
    check_cast,
    check_embeddings,
    check_structure,
    needs_structure,
    structure_for,
)
from meshwright.parallel.chunked_loss.head import head_to_join, join_head_with_loss
from meshwright.parallel.compiled import Compilation, compile_model
from meshwright.parallel.context.divide_model import SequenceDivision, context_group, divide_inputs
from meshwright.parallel.context.experts import compute_local_tokens
from meshwright.parallel.expert.average import averager_of_experts_and_others
from meshwright.parallel.expert.check import check_experts
from meshwright.parallel.expert.divide import divide_experts
from meshwright.parallel.expert.loads import ExpertLoads
from meshwright.parallel.float8 import convert_linears_to_float8
from meshwright.parallel.mesh import build_mesh, data_group, position_in_mesh, token_group
from meshwright.parallel.model import MakeAverager, ParallelModel
from meshwright.parallel.pipeline.pipeline import PipelineExecutor
from meshwright.parallel.pipeline.stages import LocalStages, cut_stages, recompute_stages
from meshwright.parallel.precision import gradient_reduce_dtype, register_casts
from meshwright.parallel.replicate.batch_norm import synchronize_batch_norm
from meshwright.parallel.replicate.gradient_averaging import gradient_averager
from meshwright.parallel.replicate.local_steps import LocalSteps
from meshwright.parallel.replicate.replicate import replicate
from meshwright.parallel.shard import shard
from meshwright.parallel.tensor.outside_dispatch import gather_for_custom_functions
from meshwright.parallel.tensor.split_modules import split_modules
from meshwright.parallel.weights.layout import ParameterLayout
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.profile.different_blocks import may_run_different_blocks
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.structure.structure import Structure

T = TypeVar("T")
# Allocates and initializes the weights of a module that is on the meta device, given the layouts of split parameters.
FillWeights = Callable[[nn.Module, Mapping[str, ParameterLayout]], None]


@dataclass(frozen=True)
class _LocalModel:
    """This rank's part of the model. `module` contains all of its modules: the user's model, or with a pipeline those
    of the rank's stages. `models` are the modules whose layers are split and wrapped: the user's model, or with a
    pipeline the model of each stage. `layouts` has, by name, the layouts of parameters that are split, lie in a branch
    or belong to experts that are divided over ranks."""

    module: nn.Module
    models: list[nn.Module]
    stages: LocalStages | None
    branches: AssignedBranches | None
    layouts: dict[str, ParameterLayout]
    expert_loads: ExpertLoads | None


def apply(
    plan: Plan,
    module: nn.Module,
    device: torch.device,
    world_size: int,
    sample: Any = None,
    target: str | None = None,
    fill: FillWeights | None = None,
) -> ParallelModel:
    """Applies the plan to the module, in place, and returns this rank's part of the model.

    `sample` is a batch as the model gets it; a plan that splits the model or cuts it into stages needs it to find out
    how the model can be divided. `target` is the key of the target in a batch that is a dict. `fill` allocates
    and initializes the weights of a module that is on the meta device; None if the module has its weights already.
    """
    # A plan that cannot run is refused before anything is changed.
    check_rules(plan, device=device.type)
    check_cast(plan, module)
    check_experts(plan, module)
    check_embeddings(plan, module)
    # The mesh before all else: every later step communicates over one of its axes.
    mesh = build_mesh(plan, device.type, world_size)
    position = position_in_mesh(mesh, plan)
    structure = _checked_structure(plan, module, sample, target)
    head = _head_to_join(plan, module, sample, target)
    shards_blocks = plan.axes.shard > 1 and not may_run_different_blocks(module, structure, sample, target)
    state_names = tuple(module.state_dict())
    # Divide the model before anything wraps it: later steps see the shard of a weight as an ordinary parameter.
    stages = _cut_stages(plan, module, structure, position.pipeline, sample, target)
    local = _divide(plan, module, stages, structure, mesh, device, move=fill is None)
    # After layers are split: a rank's positions are divided first, and the split layers see the local ones.
    division = None
    if plan.axes.context > 1 and mesh:
        group, inputs = context_group(mesh, plan), _required(structure).sequences
        division = SequenceDivision(module, inputs, group, plan.modules.attention_exchange)
        for model in local.models:
            divide_inputs(model, division)
        if plan.axes.expert == 1:  # experts that are divided over ranks get the tokens of the rank anyway
            compute_local_tokens(local.models)
    if plan.axes.context > 1 or plan.axes.tensor > 1 or plan.modules.splits:
        gather_for_custom_functions(local.module)
    if head:
        join_head_with_loss(head, plan)
    # Replace forward passes before DDP and FSDP2 register their hooks, which then run around the replaced passes.
    warns = position.data_rank == 0 and position.context == 0 and position.tensor == 0
    compilation = _replace_forward_passes(plan, module, local, mesh, device, warns)
    sums = _small_sums(plan, device, local.module) if world_size > 1 else None
    # Shard or replicate after everything that replaces parameters, because DDP and FSDP2 keep the parameters that they
    # find.
    runner, make_averager = _shard_or_replicate(plan, local, shards_blocks, mesh, sums, device, fill)
    # The hooks of branches after all other hooks: branches exchange tensors outside of what those hooks do.
    if local.branches:
        connect_branches(local.branches, module)
    # Last, what runs a step in another way than by calling `runner`.
    local_steps = None
    if plan.gradients.local_steps > 1 and isinstance(runner, DistributedDataParallel):
        local_steps = LocalSteps(runner, _required(mesh).get_group("replicate"), plan)
    pipeline = PipelineExecutor(stages, plan, _required(mesh), device, division) if stages else None
    parallel = ParallelModel(
        plan,
        local.module,
        runner,
        mesh,
        position,
        device,
        state_names,
        local.layouts,
        stages.tied if stages else (),
        pipeline,
        make_averager,
        local_steps,
        sums,
        compilation,
        local.expert_loads,
    )
    # Here, because compiled functions must not register anything with torch.
    register_casts(plan, parallel)
    return parallel


def _cut_stages(
    plan: Plan, module: nn.Module, structure: Structure | None, pipeline_rank: int, sample: Any, target: str | None
) -> LocalStages | None:
    """Returns the pipeline stages of this rank; None for a plan without a pipeline."""
    if plan.axes.pipeline == 1:
        return None
    return cut_stages(module, plan, _required(structure), pipeline_rank, sample, target)


def _divide(
    plan: Plan,
    module: nn.Module,
    stages: LocalStages | None,
    structure: Structure | None,
    mesh: DeviceMesh | None,
    device: torch.device,
    *,
    move: bool,
) -> _LocalModel:
    """Assigns branches to ranks, splits layers and divides experts. Returns this rank's part of the model. With `move`,
    the weights that stay on this rank move to the device. They move after stages are cut and branches are assigned, so
    that weights of other ranks are never moved."""
    # Ranks know the layouts of all branches, also of those that lie on other ranks.
    branches = assign_branches(module, plan, _required(mesh), device) if has_assigned_branches(plan) else None
    local_module = stages.module if stages else module
    models: list[nn.Module] = [stage.model for stage in stages.stages] if stages else [module]
    # To the device before splitting and wrapping: DDP's buckets take the strides that parameters have when it wraps.
    if move:
        for model in (local_module, *models):
            _move(model, plan, device)
    layouts: dict[str, ParameterLayout] = dict(branches.layouts) if branches else {}
    if structure and mesh and (plan.axes.tensor > 1 or plan.modules.splits):
        layouts |= split_modules(models, plan, structure, mesh)
    # Experts after other layers: the split layers of a list of experts are on their ranks already.
    experts = divide_experts(models, plan, _required(mesh), device) if plan.axes.expert > 1 else None
    layouts |= experts.layouts if experts else {}
    return _LocalModel(local_module, models, stages, branches, layouts, experts.loads if experts else None)


def _replace_forward_passes(
    plan: Plan, module: nn.Module, local: _LocalModel, mesh: DeviceMesh | None, device: torch.device, warns: bool
) -> Compilation:
    """Installs synchronized BatchNorm, the kernels of convolutions, recomputation, fp8 and compilation, where the plan
    has them. Returns what is compiled. `warns`: this rank gives the warnings about compiling."""
    # Synchronized BatchNorm replaces the forward pass of layers before recomputing wraps the forward pass of blocks.
    if (group := data_group(mesh, plan)) is not None:
        for model in local.models:
            if plan.numerics.batch_norm == "synchronized":
                synchronize_batch_norm(model, group)
            else:  # layers that torch would synchronize stay synchronized
                synchronize_batch_norm(model, group, kinds=(nn.SyncBatchNorm,))
    # The kernels of convolutions before recomputing, so that recomputed layers use them, too.
    if plan.compute.convolutions == "nnpack":
        for model in local.models:
            use_nnpack(model)
    stages = local.stages.stages if local.stages else ()
    # Blocks with split layers are compiled before recomputing wraps them: the compiler cannot recompute on shards.
    if plan.axes.tensor > 1:
        compilation = compile_model(local.module, plan, device, stages, warns=warns)
    # Recomputing before DDP and FSDP2, because both look for the parameters that the forward pass of whole blocks used.
    _recompute(plan, module, local.stages, local.branches)
    # fp8 before compiling, so that the casts are compiled together with the layers.
    if plan.numerics.precision == "fp8":
        convert_linears_to_float8(module, device)
    # Compiling before DDP and FSDP2, so that their hooks stay outside of the compiled code.
    if plan.axes.tensor == 1:
        compilation = compile_model(local.module, plan, device, stages, warns=warns)
    return compilation


def _shard_or_replicate(
    plan: Plan,
    local: _LocalModel,
    shards_blocks: bool,
    mesh: DeviceMesh | None,
    sums: SmallSums | None,
    device: torch.device,
    fill: FillWeights | None,
) -> tuple[nn.Module, MakeAverager | None]:
    """Shards or replicates the parameters, and fills the weights of a module that is on the meta device. Returns the
    module that is called in training, and a function that makes the `GradientAverager` of its gradients. The function
    is None if FSDP2 averages them, or if there is nothing to average."""
    # Weights are filled before they are replicated, but after they are sharded: filled earlier, each rank would have to
    # allocate them in full.
    if fill is not None and plan.axes.shard == 1:
        fill(local.module, local.layouts)
    if plan.axes.shard > 1:
        # With a pipeline the stages are sharded, because PyTorch's schedules look for FSDP2 on the module that they
        # call. If random numbers or data decide which blocks run, the model is one unit, because all ranks have to
        # gather in the same order.
        for model in local.stages.stages if local.stages else local.models:
            shard(model, _required(mesh), plan, per_block=shards_blocks)
        if fill is not None:
            fill(local.module, local.layouts)
    elif plan.axes.expert > 1:
        return local.module, averager_of_experts_and_others(plan, local.module, _required(mesh), local.layouts, device)
    elif plan.axes.replicate > 1 or plan.axes.context > 1:
        return _replicate(plan, local.module, _required(mesh), local.layouts, _required(sums), device)
    return local.module, None


def _recompute(plan: Plan, module: nn.Module, stages: LocalStages | None, branches: AssignedBranches | None) -> None:
    if stages:
        recompute_stages(stages, plan.memory.recompute)
    elif branches:
        recompute_branch_blocks(branches, module, plan.memory.recompute)
    else:
        recompute_blocks(module, plan.memory.recompute)


def _small_sums(plan: Plan, device: torch.device, module: nn.Module) -> SmallSums:
    """Returns the `SmallSums` over all ranks, which are closed when the module is freed.

    A pipeline uses the backend. A sum in shared memory would need all ranks at the same time, but the last stage needs
    one before its backward pass, and the ranks of the other stages wait for that backward pass.
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
) -> tuple[nn.Module, MakeAverager | None]:
    """Returns the module that is called in training, and a function that makes the `GradientAverager` of its gradients.

    If the replicate axis is the only one, the module is DDP around the user's module. Otherwise it is the user's module
    itself: ranks along the other axes hold different parameters, for which DDP would form different buckets. A model
    without trainable parameters has nothing to average: the function is None then.
    """
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return module, None
    split_names = [name for name, layout in layouts.items() if layout.axis == "replicate"]
    gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
    # PowerSGD and local steps are communication hooks of torch, which always use the backend.
    uses_torch_hook = plan.gradients.powersgd_rank > 0 or plan.gradients.local_steps > 1
    algorithm = "native" if uses_torch_hook else plan.gradients.algorithm
    reducer, reason = make_reducer(algorithm, token_group(mesh), device, gradient_bytes)
    if reason and mesh.get_rank() == 0:
        warnings.warn(f"{reason}: they go through the backend", stacklevel=2)
    make_averager = partial(
        gradient_averager,
        module,
        reducer,
        plan.gradients.bucket_bytes,
        split_names,
        overlap=plan.axes.pipeline == 1,
        reduce_dtype=gradient_reduce_dtype(plan),
    )
    only_replicas = plan.world_size == plan.axes.replicate
    return replicate(module, mesh, plan, reducer, split_names, sums) if only_replicas else module, make_averager


def _move(module: nn.Module, plan: Plan, device: torch.device) -> None:
    module.to(device)
    if plan.compute.layout == "channels_last":
        for parameter in module.parameters():
            parameter.data = parameter.data.to(memory_format=channels_last_format(parameter))
        for buffer in module.buffers():
            buffer.data = buffer.data.to(memory_format=channels_last_format(buffer))


def _checked_structure(plan: Plan, module: nn.Module, sample: Any, target: str | None) -> Structure | None:
    """Returns how the model can be split and cut, without splits inside of branches; None if the plan neither splits
    nor cuts. Raises an `InputError` if the plan cannot run on the model."""
    if not needs_structure(plan):
        return None
    model_structure = _traced_structure(plan, module, sample, target)
    structure = structure_for(plan, model_structure)
    check_branches(plan, module, lambda: model_structure.dataflow(structure.found_in_evaluation))
    check_structure(plan, module, structure)
    return without_branch_splits(structure, plan)


def _head_to_join(plan: Plan, module: nn.Module, sample: Any, target: str | None) -> nn.Linear | None:
    """Returns the layer that computes the model's scores, if the plan joins it with the loss; else None."""
    if plan.compute.loss_chunks == 1:
        return None
    structure = _traced_structure(plan, module, sample, target)
    head = module.get_submodule(head_to_join(plan, module, structure.head))
    assert isinstance(head, nn.Linear)
    return head


def _traced_structure(plan: Plan, module: nn.Module, sample: Any, target: str | None) -> ModelStructure:
    if sample is None:
        raise InputError(
            f"the plan ({plan.summary()}) divides the model or joins its head with the loss, and a batch is needed to"
            " find out how: give parallelize(…, sample_batch=batch)"
        )
    return ModelStructure(module, sample, target)


def _required(value: T | None) -> T:
    assert value is not None, "a plan with an axis larger than one has a mesh, and one that splits or cuts a structure"
    return value

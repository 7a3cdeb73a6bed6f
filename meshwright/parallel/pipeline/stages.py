"""Cuts a model into pipeline stages that run its original modules.

A piece is a module that is never cut: it runs as a whole in one stage. The outer modules are those that contain pieces.
A stage has a copy of the outer modules. The pieces that it runs are the model's own module objects; each piece of
another stage is replaced by a `RemoteModule`. The stage runs the model's own forward pass, as remote_modules.py
explains.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.blocks.generation_cache import disable_generation_caches
from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import Recompute, find_blocks, recompute_blocks
from meshwright.errors import InputError
from meshwright.parallel.pipeline.remote_modules import ActiveForward, RemoteModule
from meshwright.parallel.pipeline.shape_inference import ShapeInference, meta_copy
from meshwright.parallel.pipeline.stage import Stage
from meshwright.parallel.pipeline.stage_dataflow import StageDataflow, trace_stage_dataflow
from meshwright.plan import Plan
from meshwright.profile.structure.structure import Structure


@dataclass(frozen=True)
class TiedParameter:
    """A parameter that several pipeline ranks hold: its first name in the untouched model, its name in this rank's
    module, and the coordinates along the pipeline axis of the ranks that hold it. Its gradient is the sum of the
    gradients on those ranks."""

    name: str
    local_name: str
    holders: tuple[int, ...]


@dataclass(frozen=True)
class LocalStages:
    """The part of a model that one pipeline rank holds.

    - `module`: all of the rank's modules and parameters under their names in the whole model.
    - `stages`: the rank's stages, which share modules and parameters with `module`.
    - `tied`: the parameters of `module` that other pipeline ranks hold too.
    - `pipeline_rank`: the rank's coordinate along the pipeline axis.
    - `dataflow`: how the forward pass of the whole model is divided into stages.
    - `meta_model`: the whole model on the meta device.
    - `holders_by_parameter`: the pipeline ranks that hold each tied parameter of the whole model.
    """

    module: nn.Module
    stages: tuple[Stage, ...]
    tied: tuple[TiedParameter, ...]
    pipeline_rank: int
    dataflow: StageDataflow
    meta_model: nn.Module
    holders_by_parameter: dict[str, tuple[int, ...]]


def pipeline_ranks_of_stages(plan: Plan) -> tuple[int, ...]:
    """The pipeline rank of each stage: round robin, or for zbv from the first rank to the last and back."""
    ranks = plan.axes.pipeline
    stages = len(plan.pipeline.cuts) + 1
    if plan.pipeline.schedule == "zbv":
        return tuple(stage if stage < ranks else 2 * ranks - 1 - stage for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def cut_stages(
    module: nn.Module, plan: Plan, structure: Structure, pipeline_rank: int, sample: Any, target: str | None = None
) -> LocalStages:
    """Returns the stages of one pipeline rank. They take over pieces of `module`, which must not be used afterwards.
    `sample` is a batch like the one that the structure was found with."""
    dataflow = trace_stage_dataflow(module, plan, structure, sample, target)
    rank_of_stage = pipeline_ranks_of_stages(plan)
    local = tuple(stage for stage, rank in enumerate(rank_of_stage) if rank == pipeline_rank)
    meta_model = meta_copy(module)
    _check_recompute(meta_model, plan, dataflow)
    active_forward = ActiveForward()
    ranks_by_parameter = {
        name: tuple(sorted({rank_of_stage[stage] for stage in stages}))
        for name, stages in _stages_by_parameter(module, dataflow).items()
    }
    local_parameters = {name for name, ranks in ranks_by_parameter.items() if pipeline_rank in ranks}
    local_module = _local_module(module, dataflow, local, active_forward, meta_model, local_parameters)
    holders_by_parameter = {name: ranks for name, ranks in ranks_by_parameter.items() if len(ranks) > 1}
    return LocalStages(
        module=local_module,
        stages=_build_stages(module, local_module, dataflow, local, active_forward),
        tied=tuple(_tied_parameters(module, local_module, holders_by_parameter, pipeline_rank)),
        pipeline_rank=pipeline_rank,
        dataflow=dataflow,
        meta_model=meta_model,
        holders_by_parameter=holders_by_parameter,
    )


def _build_stages(
    module: nn.Module,
    local_module: nn.Module,
    dataflow: StageDataflow,
    local: tuple[int, ...],
    active_forward: ActiveForward,
) -> tuple[Stage, ...]:
    """Returns the stages of this rank. If there is only one, its model is `local_module` itself."""
    if len(local) == 1:
        return (Stage(local[0], local_module, dataflow, active_forward),)
    used_by_stage = {
        stage: {p for name, p in module.named_parameters() if name in dataflow.parameters_by_stage[stage]}
        for stage in local
    }
    unused = set(module.parameters()).difference(*used_by_stage.values())
    outer = tuple(_outer_modules(local_module, dataflow))
    stages = []
    for index, used in used_by_stage.items():
        model = _copy_for_stage(local_module, dataflow, index, active_forward, used)
        stages.append(Stage(index, model, dataflow, active_forward))
    for stage in stages:
        is_first = stage.index == local[0]
        parameters = used_by_stage[stage.index] | unused if is_first else used_by_stage[stage.index]
        stage.mirror_outer_modules(
            local_module,
            outer,
            _modules_holding(local_module, outer, parameters),
            () if is_first else dataflow.mutated_buffers,
        )
    return tuple(stages)


def _runs_in(dataflow: StageDataflow, piece: str, stages: tuple[int, ...]) -> bool:
    return piece in dataflow.run_by_every_stage or not dataflow.stages_of(piece).isdisjoint(stages)


def _outer_modules(model: nn.Module, dataflow: StageDataflow) -> Iterator[str]:
    """Names of the modules that are neither a piece nor inside of one."""
    pieces = set(dataflow.pieces)
    for name, _ in model.named_modules():
        if not any(is_inside(name, piece) for piece in pieces):
            yield name


def _modules_holding(model: nn.Module, names: tuple[str, ...], parameters: set[nn.Parameter]) -> list[str]:
    """Those of the named modules that hold one of the parameters themselves, not in a submodule."""
    return [name for name in names if not parameters.isdisjoint(model.get_submodule(name).parameters(recurse=False))]


def _stages_by_parameter(module: nn.Module, dataflow: StageDataflow) -> dict[str, set[int]]:
    """By parameter name, the stages that hold the parameter. A stage holds it if one of the stage's pieces has it, or
    if the forward pass between pieces uses it in that stage. The first stage holds parameters that nothing uses."""
    stages_with_piece: dict[int, set[int]] = {}
    for piece in dataflow.pieces:
        for parameter in module.get_submodule(piece).parameters():
            stages_with_piece.setdefault(id(parameter), set()).update(dataflow.stages_of(piece))
    stages_by_parameter = {}
    for name, parameter in module.named_parameters():
        users = {stage for stage, names in enumerate(dataflow.parameters_by_stage) if name in names}
        stages_by_parameter[name] = stages_with_piece.get(id(parameter), set()) | users or {0}
    return stages_by_parameter


def _local_module(
    module: nn.Module,
    dataflow: StageDataflow,
    local: tuple[int, ...],
    active_forward: ActiveForward,
    meta_model: nn.Module,
    local_parameters: set[str],
) -> nn.Module:
    """A copy of the model with what lies on this rank: the pieces of its `local` stages and the named parameters."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    remote: dict[str, RemoteModule] = {}
    for piece in dataflow.pieces:
        original = module.get_submodule(piece)
        if _runs_in(dataflow, piece, local):
            memo[id(original)] = original
        else:
            remote[piece] = RemoteModule(piece, active_forward, meta_model.get_submodule(piece))
            memo[id(original)] = remote[piece]
    local_module = copy.deepcopy(module, memo)
    disable_generation_caches(local_module)
    first_names = {id(parameter): name for name, parameter in module.named_parameters()}
    in_local_pieces = {
        id(parameter)
        for piece in dataflow.pieces
        if piece not in remote
        for parameter in module.get_submodule(piece).parameters()
    }
    outer = set(_outer_modules(local_module, dataflow))
    for name, parameter in module.named_parameters(remove_duplicate=False):
        owner, _, key = name.rpartition(".")
        is_local = first_names[id(parameter)] in local_parameters
        if owner in outer and not is_local:
            local_module.get_submodule(owner)._parameters[key] = None
        elif owner not in outer and is_local and id(parameter) not in in_local_pieces:
            remote_piece = next((piece for piece in remote if is_inside(name, piece)), None)
            if remote_piece is not None:
                remote[remote_piece].add_parameter(name.removeprefix(f"{remote_piece}."), parameter)
    return local_module


def _copy_for_stage(
    local_module: nn.Module, dataflow: StageDataflow, stage: int, active_forward: ActiveForward, used: set[nn.Parameter]
) -> nn.Module:
    """A copy of the rank's module for `stage`, one of several stages of the rank. `used` are the parameters that this
    stage uses."""
    memo: dict[int, Any] = {id(tensor): tensor for tensor in (*local_module.parameters(), *local_module.buffers())}
    for piece in dataflow.pieces:
        original = local_module.get_submodule(piece)
        memo[id(original)] = original
        if not _runs_in(dataflow, piece, (stage,)) and not isinstance(original, RemoteModule):
            memo[id(original)] = remote = RemoteModule(piece, active_forward, original)
            for name, submodule in original.named_modules():
                if any(parameter in used for parameter in submodule.parameters(recurse=False)):
                    remote.share_parameters(name, submodule)
    return copy.deepcopy(local_module, memo)


def _tied_parameters(
    module: nn.Module, local_module: nn.Module, holders: dict[str, tuple[int, ...]], pipeline_rank: int
) -> Iterator[TiedParameter]:
    local_names = {id(parameter): name for name, parameter in local_module.named_parameters()}
    for name, parameter in module.named_parameters():
        if pipeline_rank in holders.get(name, ()):
            yield TiedParameter(name, local_names[id(parameter)], holders[name])


def _check_recompute(meta_model: nn.Module, plan: Plan, dataflow: StageDataflow) -> None:
    if plan.memory.recompute == "none":
        return
    for block in find_blocks(meta_model):
        inside = [piece for piece in dataflow.pieces if piece != block and is_inside(piece, block)]
        stages = {
            stage for piece in inside if piece not in dataflow.run_by_every_stage for stage in dataflow.stages_of(piece)
        }
        if len(stages) > 1:
            raise InputError(
                f"plan.pipeline.cuts divide {block}, which plan.memory.recompute computes again as a whole: cut after"
                " it, or set recompute to none"
            )


def recompute_stages(local_stages: LocalStages, kind: Recompute) -> None:
    """Applies `recompute_blocks` to the blocks of the model that run in this rank's stages."""
    blocks_of_model = set(find_blocks(local_stages.meta_model))
    for stage in local_stages.stages:
        if kind != "none" and (blocks := set(find_blocks(stage.model))) and blocks <= blocks_of_model:
            recompute_blocks(stage.model, kind)


def install_transfers(local_stages: LocalStages, shape_inference: ShapeInference) -> None:
    """Puts fake tensors in the place of outer modules' parameters that lie on other ranks, gives each `RemoteModule`
    its copy on fake tensors, and registers the hooks with which pieces receive and send. Call it once, when parameters
    and all other hooks are in place."""
    fake_model, dataflow = shape_inference.fake_model, local_stages.dataflow
    models = (local_stages.module, *(stage.model for stage in local_stages.stages))
    for model in {id(model): model for model in models}.values():
        for name in _outer_modules(model, dataflow):
            module, fake_module = model.get_submodule(name), fake_model.get_submodule(name)
            for key, parameter in fake_module._parameters.items():
                if parameter is not None and module._parameters.get(key) is None:
                    module.__dict__[key] = parameter.detach()
    local = tuple(stage.index for stage in local_stages.stages)
    for piece in dataflow.pieces:
        module = local_stages.module.get_submodule(piece)
        if _runs_in(dataflow, piece, local):
            local_stages.stages[0].active_forward.add_hooks(piece, module)
            for stage in local_stages.stages:
                if not isinstance(stage.model.get_submodule(piece), RemoteModule):
                    stage.model.set_submodule(piece, module)  # it may have been replaced in the rank's module
        else:
            if not isinstance(module, RemoteModule):
                raise InputError(
                    f"plan.pipeline.cuts: the model calls {piece}, or uses its weights, also from outside of the module"
                    " that it belongs to, in another stage: cut elsewhere, or set plan.axes.pipeline to 1"
                )
            module.set_original(fake_model.get_submodule(piece))

"""Checks, before ranks start, whether a plan can run at all, and whether it can run on a given model. Errors say what
can run instead."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from meshwright.errors import InputError
from meshwright.parallel.branches.check import check_branches, has_assigned_branches, without_branch_splits
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.stage_dataflow import cuts_of_plan
from meshwright.parallel.tensor.split_modules import check_splits
from meshwright.parallel.torch_private import AnyBatchNorm
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.structure.structure import Structure


def check_plan(plan: Plan, model: nn.Module, sample: Any, target: str | None = None) -> None:
    """Raises an `InputError` if the plan cannot run on the model, which may be on the meta device."""
    plan_checker(model, sample, target)(plan)


def plan_checker(model: nn.Module, sample: Any, target: str | None = None) -> Callable[[Plan], None]:
    """Returns a function that raises an `InputError` if a plan cannot run on the model, which may be on the meta
    device. To check many plans of one model this is faster than `check_plan`: the model's structure is found only
    once."""
    return checker_of_structure(ModelStructure(model, sample, target))


def checker_of_structure(structure: ModelStructure) -> Callable[[Plan], None]:
    """Returns a function that raises an `InputError` if a plan cannot run on the model of this structure."""
    model = structure.model

    def flow() -> Dataflow:
        return structure.dataflow(structure.find().found_in_evaluation)

    @cache
    def is_sparse() -> bool:
        return _first_sparse_module(model) is not None

    def check(plan: Plan) -> None:
        check_runnable(plan)
        check_cast(plan, model)
        if is_sparse():
            check_sparse(plan, model)
        if needs_structure(plan):
            check_branches(plan, model, flow)
            check_structure(plan, model, structure.find())

    return check


def needs_structure(plan: Plan) -> bool:
    """Whether the plan splits layers of the model or cuts it into stages. Both need the model's structure."""
    return plan.axes.tensor > 1 or plan.axes.pipeline > 1 or bool(plan.modules.splits)


def check_runnable(plan: Plan) -> None:
    """Raises an `InputError` if the plan contradicts itself, so that no model can run with it."""
    _check_precision(plan)
    over_replicate = [
        name for name, split in plan.modules.splits.items() if split.axis == "replicate" and split.kind != "none"
    ]
    if over_replicate and plan.world_size > plan.axes.replicate:
        raise InputError(
            f"plan.modules.splits.{over_replicate[0]} splits a layer over the replicate axis, which works where that"
            f" axis is the only one: of {plan.summary()} leave out the split, or the other axes"
        )
    if has_assigned_branches(plan) and plan.axes.pipeline > 1:
        raise InputError(
            f"plan.modules.branches.{next(iter(plan.modules.branches))} runs on one rank of the tensor axis, which"
            f" works without a pipeline: of {plan.summary()} leave out the branches, or set axes.pipeline to 1"
        )


def _check_precision(plan: Plan) -> None:
    precision, axes = plan.numerics.precision, plan.axes
    if precision == "auto":
        raise InputError("plan.numerics.precision is auto: a run replaces it, and here it must be one of fp32 to fp8")
    if plan.numerics.cast == "weights" and (axes.shard == 1 or precision not in ("bf16", "fp16")):
        raise InputError(
            "plan.numerics.cast is weights, which the shard axis gathers in bf16 or fp16, but axes.shard is"
            f" {axes.shard} and precision {precision}: raise the axis and choose one of these, or set cast to operators"
        )
    if precision == "fp8" and (axes.tensor > 1 or axes.pipeline > 1):
        raise InputError(
            f"plan.numerics.precision is fp8, which runs over replicate and shard, not over tensor or pipeline: of"
            f" {plan.summary()} leave out these axes, or choose bf16"
        )
    if plan.compute.cuda_graphs and plan.compute.compile == "none" and plan.world_size > 1:
        raise InputError(
            f"plan.compute.cuda_graphs records steps of one rank, or compiled blocks of any number: of {plan.summary()}"
            " leave it out, or set compute.compile to default"
        )


def check_cast(plan: Plan, model: nn.Module) -> None:
    """Raises an `InputError` if `numerics.cast` is `weights` and the model has a BatchNorm. PyTorch's BatchNorm accepts
    weights in half precision only together with running statistics in half precision, and these stay in fp32."""
    if plan.numerics.cast != "weights":
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, AnyBatchNorm)), None)
    if name is not None:
        raise InputError(
            f"plan.numerics.cast is weights, but {name} is a BatchNorm, whose statistics stay in fp32 and do not go"
            " with rounded weights: set it to operators"
        )


def check_sparse(plan: Plan, model: nn.Module, clip_norm: float | None = None) -> None:
    """Raises an `InputError` if the plan or `clip_norm` needs dense gradients but the model has sparse ones. Only the
    replicate axis can average sparse gradients. Axes that divide weights, clipping and loss scaling (fp16) need dense
    gradients."""
    name = _first_sparse_module(model)
    if name is None:
        return
    if plan.world_size > plan.axes.replicate or any(s.kind != "none" for s in plan.modules.splits.values()):
        raise InputError(
            f"{name} has sparse gradients, which only the replicate axis can average, but the plan is"
            f" {plan.summary()}: set sparse to false, or use the replicate axis only"
        )
    if clip_norm is not None or plan.numerics.precision == "fp16":
        option = "train.clip_norm" if clip_norm is not None else "plan.numerics.precision fp16"
        raise InputError(
            f"{name} has sparse gradients, which torch neither clips nor unscales, but {option} asks for it: set"
            " sparse to false, or leave that out"
        )


def _first_sparse_module(model: nn.Module) -> str | None:
    """The name of the first module with sparse gradients, such as `nn.Embedding(sparse=True)`, or None."""
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)


def check_structure(plan: Plan, model: nn.Module, structure: Structure) -> None:
    """Raises an `InputError` if the model cannot be split and cut as the plan says."""
    check_pipeline(plan, structure)
    check_splits(model, plan, without_branch_splits(structure, plan))
    if plan.axes.pipeline > 1 and plan.axes.tensor > 1:
        _check_groups_are_whole(plan, structure)


def _check_groups_are_whole(plan: Plan, structure: Structure) -> None:
    """Raises an `InputError` if a cut of the pipeline separates modules that are split along the tensor axis
    together."""
    piece_numbers = {name: number for number, name in enumerate(structure.pieces)}
    stage_ends = sorted(piece_numbers[cut.after] for cut in cuts_of_plan(plan, structure))
    for group, (begin, end) in zip(structure.splits, structure.piece_ranges, strict=True):
        stage = bisect_left(stage_ends, begin)
        if stage == bisect_left(stage_ends, end) or any(split.kind == "vocabulary" for split in group.splits):
            continue
        plan_splits = [plan.modules.split_of(split.module) for split in group.splits]
        if not any(plan_split and plan_split.kind == "none" for plan_split in plan_splits):
            first, last = group.splits[0].module, group.splits[-1].module
            cut = plan.pipeline.cuts[stage]
            raise InputError(
                f"plan.pipeline.cuts: the cut after {cut} separates {first} and {last}, which are split along the"
                f" tensor axis together: cut after {last}, or leave them whole with plan.modules.splits:"
                f" {{{first}: {{kind: none}}}}"
            )

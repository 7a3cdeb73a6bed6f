"""What of a plan cannot be run, or not on this model, said before ranks start and with what can be run instead."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.errors import InputError
from meshwright.parallel.branches.check import apart, beside_branches, check_branches
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.wiring import chosen_cuts
from meshwright.parallel.tensor.split_modules import check_splits
from meshwright.plan import Plan
from meshwright.profile.structure.dataflow import Flow, record_flow
from meshwright.profile.structure.structure import Structure, structure


def check_plan(plan: Plan, model: nn.Module, sample: Any, target: str | None = None) -> None:
    """The model may lie on the meta device."""
    checker(model, sample, target)(plan)


def checker(model: nn.Module, sample: Any, target: str | None = None) -> Callable[[Plan], None]:
    """`check_plan` for many plans of one model, whose structure is found once."""

    @cache
    def found() -> Structure:
        return structure(model, sample, target=target)

    @cache
    def flow() -> Flow:
        return record_flow(model, sample, 2, target=target, evaluating=found().evaluated)

    @cache
    def is_sparse() -> bool:
        return _sparse(model) is not None

    def check(plan: Plan) -> None:
        check_runnable(plan)
        check_cast(plan, model)
        if is_sparse():
            check_sparse(plan, model)
        if needs_structure(plan):
            check_branches(plan, model, flow)
            check_structure(plan, model, found())

    return check


def needs_structure(plan: Plan) -> bool:
    """Whether the plan divides the model, so that how it can be divided must be known."""
    return plan.axes.tensor > 1 or plan.axes.pipeline > 1 or bool(plan.modules.splits)


def check_runnable(plan: Plan) -> None:
    """What no model changes."""
    _check_precision(plan)
    wide = [name for name, split in plan.modules.splits.items() if split.axis == "replicate" and split.kind != "none"]
    if wide and plan.world_size > plan.axes.replicate:
        raise InputError(
            f"plan.modules.splits.{wide[0]} splits a layer over the replicate axis, which works where that axis is the"
            f" only one: of {plan.summary()} leave out the split, or the other axes"
        )
    if apart(plan) and plan.axes.pipeline > 1:
        raise InputError(
            f"plan.modules.branches.{next(iter(plan.modules.branches))} lives on one rank of the tensor axis, which"
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
    """PyTorch's BatchNorm takes half-precision weights only with statistics of the same kind."""
    if plan.numerics.cast != "weights":
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, _BatchNorm)), None)
    if name is not None:
        raise InputError(
            f"plan.numerics.cast is weights, but {name} is a BatchNorm, whose statistics stay in fp32 and do not go"
            " with rounded weights: set it to operators"
        )


def check_sparse(plan: Plan, model: nn.Module, clip_norm: float | None = None) -> None:
    """Replicas bring sparse gradients together row by row; what divides a weight wants dense ones, and so do torch's
    norms and its scaled losses."""
    name = _sparse(model)
    if name is None:
        return
    if plan.world_size > plan.axes.replicate or any(s.kind != "none" for s in plan.modules.splits.values()):
        raise InputError(
            f"{name} has sparse gradients, which replicas alone can bring together, but the plan is"
            f" {plan.summary()}: set sparse to false, or use the replicate axis only"
        )
    if clip_norm is not None or plan.numerics.precision == "fp16":
        what = "train.clip_norm" if clip_norm is not None else "plan.numerics.precision fp16"
        raise InputError(
            f"{name} has sparse gradients, which torch neither clips nor unscales, but {what} asks for it: set"
            " sparse to false, or leave that out"
        )


def _sparse(model: nn.Module) -> str | None:
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)


def check_structure(plan: Plan, model: nn.Module, found: Structure) -> None:
    check_pipeline(plan, found)
    check_splits(model, plan, beside_branches(found, plan))
    if plan.axes.pipeline > 1 and plan.axes.tensor > 1:
        _check_groups_are_whole(plan, found)


def _check_groups_are_whole(plan: Plan, found: Structure) -> None:
    """Modules that are split together lie in one stage."""
    numbers = {name: number for number, name in enumerate(found.pieces)}
    ends = sorted(numbers[cut.after] for cut in chosen_cuts(plan, found))
    for group, (begin, end) in zip(found.splits, found.spans, strict=True):
        stage = bisect_left(ends, begin)
        if stage == bisect_left(ends, end) or any(split.kind == "vocabulary" for split in group.splits):
            continue
        if not any((own := plan.modules.split_of(s.module)) and own.kind == "none" for s in group.splits):
            first, last = group.splits[0].module, group.splits[-1].module
            cut = plan.pipeline.cuts[stage]
            raise InputError(
                f"plan.pipeline.cuts: the cut behind {cut} parts {first} and {last}, which are split along the tensor"
                f" axis together: cut behind {last}, or leave them whole with plan.modules.splits:"
                f" {{{first}: {{kind: none}}}}"
            )

"""Checks, before ranks start, whether a plan can run in general and on a given model. Errors say what can run
instead."""

from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn

from meshwright.errors import InputError
from meshwright.parallel.branches.check import check_branches, without_branch_splits
from meshwright.parallel.chunked_loss.head import head_to_join
from meshwright.parallel.expert.check import ExpertFacts, check_experts, expert_facts
from meshwright.parallel.pipeline.check import check_pipeline
from meshwright.parallel.pipeline.stage_dataflow import cuts_of_plan
from meshwright.parallel.tensor.split_modules import check_splits
from meshwright.parallel.torch_private import AnyBatchNorm
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.profile.structure.dataflow import ControlFlowError
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.structure.structure import Structure, untraced_structure


def check_plan(plan: Plan, model: nn.Module, sample: Any, target: str | None = None) -> None:
    """Raises an `InputError` if the plan cannot run on the model, which may be on the meta device."""
    plan_checker(model, sample, target)(plan)


def plan_checker(model: nn.Module, sample: Any, target: str | None = None) -> Callable[[Plan], None]:
    """Returns a function that raises an `InputError` if a plan cannot run on the model, which may be on the meta
    device. To check many plans of one model this is faster than `check_plan`: the model's structure is found only
    once."""
    return checker_of_plans(ModelStructure(model, sample, target))


def checker_of_plans(structure: ModelStructure, **facts: Any) -> Callable[[Plan], None]:
    """Returns a function that raises an `InputError` if a plan cannot run on the model of this structure. The `facts`
    decide which rules hold (plan_rules/rule.py)."""
    model = structure.model

    @cache
    def is_sparse() -> bool:
        return _first_sparse_module(model) is not None

    @cache
    def experts() -> ExpertFacts:
        return expert_facts(model)

    accepted: set[tuple[object, ...]] = set()

    def check_divisions(plan: Plan) -> None:
        """Checks what the structure of the model decides. A search asks about thousands of plans that differ in nothing
        that this depends on, so what was accepted is kept."""
        key = _division_key(plan)  # None: the plan names modules, so what it allows is not kept
        if key is not None and key in accepted:
            return
        check_branches(plan, model, structure.forward_pass)
        check_structure(plan, model, structure_for(plan, structure))
        if key is not None:
            accepted.add(key)

    def check(plan: Plan) -> None:
        check_rules(plan, **facts)
        check_cast(plan, model)
        check_experts(plan, model, experts)
        check_embeddings(plan, model)
        if is_sparse():
            check_sparse(plan, model)
        check_derivatives(plan, structure)
        if plan.compute.loss_chunks > 1:
            head_to_join(plan, model, structure.head)
        if needs_structure(plan):
            check_divisions(plan)

    return check


def _division_key(plan: Plan) -> tuple[object, ...] | None:
    """All that `check_branches` and `check_structure` depend on. None for a plan that names modules."""
    axes, pipeline, modules = plan.axes, plan.pipeline, plan.modules
    if modules.splits or modules.branches:
        return None
    sizes = axes.context > 1, axes.tensor, axes.pipeline, axes.shard > 1
    return (*sizes, pipeline.schedule, pipeline.cuts, modules.sequence, modules.loss)


def structure_for(plan: Plan, structure: ModelStructure) -> Structure:
    """Returns the structure of the model. A model whose code depends on the values of tensors cannot be traced; for it,
    only what the plan names can be split, and plans that need to know more raise an `InputError`."""
    try:
        return structure.find()
    except ControlFlowError as error:
        names_splits = any(split.kind != "none" for split in plan.modules.splits.values())
        needs_more = plan.axes.pipeline > 1 or plan.axes.context > 1 or plan.modules.sequence or plan.modules.loss
        if not names_splits or needs_more:
            raise
        return untraced_structure(structure.model, str(error))


def check_derivatives(plan: Plan, structure: ModelStructure) -> None:
    """Raises an `InputError` if the forward pass of the model takes derivatives, and the plan recomputes selectively or
    compiles blocks, through which torch cannot differentiate twice. A model that cannot be traced is not refused."""
    recompute, compile_mode = plan.memory.recompute, plan.compute.compile
    if recompute != "selective" and compile_mode == "none":
        return
    try:
        takes_derivatives = structure.takes_derivatives()
    except InputError:
        return
    if takes_derivatives:
        field, value, instead = (
            ("memory.recompute", "selective", "none or full")
            if recompute == "selective"
            else ("compute.compile", compile_mode, "none")
        )
        raise InputError(
            f"plan.{field} is {value}, but the model takes derivatives in its forward pass (torch.autograd.grad), and"
            f" torch cannot differentiate such blocks a second time: set {field} to {instead}"
        )


def needs_structure(plan: Plan) -> bool:
    """Whether the plan divides sequences, splits layers of the model or cuts it into stages. All of these need the
    model's structure."""
    axes = plan.axes
    return axes.context > 1 or axes.tensor > 1 or axes.pipeline > 1 or bool(plan.modules.splits)


def check_cast(plan: Plan, model: nn.Module) -> None:
    """Raises an `InputError` if `numerics.cast` is `weights` and the model has a BatchNorm. PyTorch's BatchNorm accepts
    weights in half precision only together with running statistics in half precision, and these stay in fp32."""
    if plan.numerics.cast != "weights":
        return
    name = next((name for name, module in model.named_modules() if isinstance(module, AnyBatchNorm)), None)
    if name is not None:
        raise InputError(
            f"plan.numerics.cast is weights, but {name} is a BatchNorm, whose running statistics stay in fp32, which"
            " PyTorch does not combine with half-precision weights: set plan.numerics.cast to operators"
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
            f" {plan.summary()}: build {name} with sparse=False, or use the replicate axis only"
        )
    if clip_norm is not None:
        raise InputError(
            f"{name} has sparse gradients, which PyTorch cannot clip, but train.clip_norm is {clip_norm}: build {name}"
            " with sparse=False, or remove train.clip_norm"
        )
    if plan.numerics.precision == "fp16":
        raise InputError(
            f"{name} has sparse gradients, for which PyTorch cannot undo the loss scaling of fp16, but"
            f" plan.numerics.precision is fp16: build {name} with sparse=False, or choose another precision"
        )


def _first_sparse_module(model: nn.Module) -> str | None:
    """The name of the first module with sparse gradients, such as `nn.Embedding(sparse=True)`, or None."""
    return next((name for name, module in model.named_modules() if getattr(module, "sparse", False) is True), None)


def check_embeddings(plan: Plan, model: nn.Module) -> None:
    """Raises an `InputError` if the model has an embedding that depends on all samples of a batch, and the plan divides
    these: gradients with `scale_grad_by_freq` are divided by how often a token occurs, and `max_norm` writes the rows
    of the tokens that occur. Plans whose ranks update their weights without each other are not refused, since they do
    not train what one device trains."""
    if plan.gradients.updates != "synchronous" or plan.gradients.local_steps > 1:
        return
    for name, module in model.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.scale_grad_by_freq and module.weight.requires_grad and plan.batch_parts > 1:
            option, effect, instead = "scale_grad_by_freq", "scales gradients by how often a token occurs", "False"
        elif module.max_norm is not None and _divides_writes(plan, module, model):
            option, effect, instead = "max_norm", "writes the rows of the tokens that occur", "None"
        else:
            continue
        raise InputError(
            f"{name or 'the model'} has {option}={getattr(module, option)}, which {effect} in a batch, but under the"
            f" plan ({plan.summary()}) a forward pass gets some of its tokens only: build it with {option}={instead},"
            " or choose a plan without replicate and shard axes, accumulation and microbatches"
        )


def _divides_writes(plan: Plan, embedding: nn.Embedding | nn.EmbeddingBag, model: nn.Module) -> bool:
    """Whether ranks would write different rows of this embedding, or another module that uses its weight would see in
    one microbatch what the next one is to write. A row that is written twice stays as it is."""
    users = [m for m in model.modules() if any(p is embedding.weight for p in m.parameters(recurse=False))]
    return plan.data_ranks > 1 or (plan.microbatches > 1 and len(users) > 1)


def check_structure(plan: Plan, model: nn.Module, structure: Structure) -> None:
    """Raises an `InputError` if the model cannot be divided, split or cut as the plan says."""
    if plan.axes.context > 1 and not structure.sequences:
        raise InputError(
            f"plan.axes.context is {plan.axes.context}, but {structure.no_sequence_reason}: set axes.context to 1, and"
            " use the other axes"
        )
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
        if stage == bisect_left(stage_ends, end) or not _needs_one_stage(group, plan):
            continue
        first, last = group.splits[0].module, group.splits[-1].module
        nearest = _cuts_around(begin, end, stage, stage_ends, plan, structure)
        other_cut = f"cut after {' or '.join(nearest)} instead, or " if nearest else ""
        raise InputError(
            f"plan.pipeline.cuts: the cut after {plan.pipeline.cuts[stage]} separates {first} and {last}, which are"
            f" split along the tensor axis together: {other_cut}add plan.modules.splits: {{{first}: {{kind: none}}}},"
            " which leaves the whole group of layers unsplit"
        )


def _needs_one_stage(group: SplitGroup, plan: Plan) -> bool:
    """Whether all modules of the group must be in one pipeline stage. They need not if they are split by vocabulary, or
    if the plan leaves one of them, and thereby the group, unsplit."""
    plan_splits = [plan.modules.split_of(split.module) for split in group.splits]
    is_unsplit = any(plan_split and plan_split.kind == "none" for plan_split in plan_splits)
    return not is_unsplit and not any(split.kind == "vocabulary" for split in group.splits)


def _cuts_around(
    begin: int, end: int, stage: int, stage_ends: list[int], plan: Plan, structure: Structure
) -> list[str]:
    """The names of the modules after which the plan may cut instead of after the last piece of `stage`, so that the
    pieces from `begin` to `end` are in one stage: the nearest one before them and the nearest one after them, as far as
    there are any. `stage_ends` are the last pieces of the stages. The other cuts stay where they are."""
    previous_end = stage_ends[stage - 1] if stage > 0 else -1
    next_end = stage_ends[stage + 1] if stage + 1 < len(stage_ends) else len(structure.pieces)
    cuttable = {cut.after for cut in structure.cuts if cut.crossing}

    def is_accepted(piece: int) -> bool:
        return structure.pieces[piece] in cuttable and not any(
            first <= piece < last and _needs_one_stage(group, plan)
            for group, (first, last) in zip(structure.splits, structure.piece_ranges, strict=True)
        )

    before = next((piece for piece in range(begin - 1, previous_end, -1) if is_accepted(piece)), None)
    after = next((piece for piece in range(end, next_end) if is_accepted(piece)), None)
    return [structure.pieces[piece] for piece in (before, after) if piece is not None]

"""`Structure`: how a model can be split along the tensor axis (`splits.py`), where it can be cut into pipeline stages
(`cuts.py`), which of its branches are independent (`branches.py`), and which of its weights are tied. Planner and
runtime use the same structure.

Two forward passes on fake tensors, with different batch sizes, tell which module uses which values. Of consecutive
equal blocks only three are traced (`equal_blocks.py`), and the findings of the middle block are repeated for all blocks
between the first and the last.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from meshwright.blocks.module_names import enclosing_modules, is_inside
from meshwright.errors import InputError
from meshwright.profile.equal_blocks import EqualBlocks, find_equal_blocks
from meshwright.profile.experts import find_expert_layers
from meshwright.profile.structure.branches import Branches, find_branches, outermost_modules
from meshwright.profile.structure.cuts import BatchDimension, Cut, NoCut, find_cuts
from meshwright.profile.structure.dataflow import Dataflow, record_dataflow
from meshwright.profile.structure.pieces import find_pieces
from meshwright.profile.structure.sequence import SequenceInput, find_sequence_inputs
from meshwright.profile.structure.splits import SplitGroup, find_splits
from meshwright.profile.structure.transformers_plans import with_transformers_splits
from meshwright.profile.structure.vocabulary_splits import find_vocabulary_splits
from meshwright.profile.structure.wide_layers import WideChain, find_wide_chains

_BATCHES = (2, 3)
T = TypeVar("T")


@dataclass(frozen=True)
class Tie:
    """A tied weight: all names of one parameter, and the modules that it belongs to."""

    parameters: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """How a model can be divided among ranks.

    `pieces` are the names of the modules that pipeline stages are made of, in the order in which they run.
    `no_cut_reason` says why there are no cuts; it is empty if there are any. `found_in_evaluation` is True if the
    forward pass in training mode could not be traced, for example because random numbers or data decide which layers
    run. The structure then describes the forward pass in evaluation mode. `sequences` are the inputs that ranks of the
    context axis divide by position; `no_sequence_reason` says why there are none.
    """

    splits: tuple[SplitGroup, ...]
    wide_chains: tuple[WideChain, ...]
    pieces: tuple[str, ...]
    cuts: tuple[Cut, ...]
    no_cuts: tuple[NoCut, ...]
    no_cut_reason: str
    branches: tuple[Branches, ...]
    ties: tuple[Tie, ...]
    found_in_evaluation: bool = False
    sequences: tuple[SequenceInput, ...] = ()
    no_sequence_reason: str = ""

    @cached_property
    def piece_ranges(self) -> tuple[tuple[int, int], ...]:
        """For each group of `splits`, the indices of the first and the last of the `pieces` that contain a module of
        the group. A module outside of all pieces counts as part of piece 0."""
        numbers = {name: number for number, name in enumerate(self.pieces)}

        def piece_of(module: str) -> int:
            return min((numbers[name] for name in enclosing_modules(module) if name in numbers), default=0)

        pieces = [[piece_of(split.module) for split in group.splits] for group in self.splits]
        return tuple((min(group, default=0), max(group, default=0)) for group in pieces)

    def to_dict(self) -> dict[str, Any]:
        """The structure as plain dicts, lists, strings and numbers, for YAML."""
        plain: dict[str, Any] = _plain(self)
        return plain


def find_structure(
    model: nn.Module, sample: Any, *, target: str | None = None, merge_equal_blocks: bool = True
) -> Structure:
    """Returns the structure of a model on batches like `sample`. If `merge_equal_blocks` is False, every block is
    traced. The model may be on the meta device; it is not changed."""
    equal_blocks = find_equal_blocks(model) if merge_equal_blocks else ()
    try:
        flow, larger, is_evaluation = _record_dataflows(model, sample, equal_blocks, target)
    except (IndexError, InputError) as error:
        # A model fails without the skipped blocks if it indexes its blocks by number, or needs the outputs of all.
        if equal_blocks:
            return find_structure(model, sample, target=target, merge_equal_blocks=False)
        if isinstance(error, InputError):
            raise
        raise InputError(f"the model cannot be traced: {error}") from error
    if not _has_same_operators(flow, larger):
        raise InputError(
            f"the model runs different operators for batches of {_BATCHES[0]} and {_BATCHES[1]} samples: its structure"
            " cannot be found"
        )
    pieces = find_pieces(model, flow)
    cuts, no_cuts = find_cuts(pieces, larger, _BATCHES)
    router = next((layer.module for layer in find_expert_layers(model) if layer.kind == "list"), None)
    if router is not None:  # a stage without the router could not decide which experts are called
        cuts, no_cuts = (), ()
    groups = find_splits(flow)
    groups = (*find_vocabulary_splits(flow, groups), *groups)
    if (
        any(_skips_neighbour(cut, row) for cut in cuts for row in equal_blocks)
        or any(_spans_blocks(group, row) for group in groups for row in equal_blocks)
        or any(_runs_between(name, pieces.names, row) for name in set(pieces.names) for row in equal_blocks)
    ):
        return find_structure(model, sample, target=target, merge_equal_blocks=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    sequences, no_sequence_reason = find_sequence_inputs(flow)
    names = tuple(dict.fromkeys(_repeat(pieces.names, equal_blocks, str, _rename)))
    return Structure(
        splits=with_transformers_splits(
            model, _repeat(groups, equal_blocks, lambda group: group.name, _rename_in_group)
        ),
        wide_chains=find_wide_chains(flow, parameters, lambda name: len(_repeat([name], equal_blocks, str, _rename))),
        pieces=names,
        cuts=_repeat(cuts, equal_blocks, lambda cut: cut.after, _rename_in_cut),
        no_cuts=_repeat(no_cuts, equal_blocks, lambda no_cut: no_cut.after, _rename_in_no_cut),
        no_cut_reason=_no_cut_reason(pieces.names, cuts, no_cuts, router),
        branches=tuple(_repeat_in_branches(branches, names, equal_blocks) for branches in find_branches(pieces)),
        ties=tuple(_ties(model)),
        found_in_evaluation=is_evaluation,
        sequences=sequences,
        no_sequence_reason=no_sequence_reason,
    )


def untraced_structure(model: nn.Module, reason: str) -> Structure:
    """Returns the structure of a model that cannot be traced for this reason: nothing is known but its tied weights."""
    return Structure((), (), (), (), (), reason, (), tuple(_ties(model)))


def _record_dataflows(
    model: nn.Module, sample: Any, equal_blocks: tuple[EqualBlocks, ...], target: str | None
) -> tuple[Dataflow, Dataflow, bool]:
    """Returns the dataflows for the two batch sizes of `_BATCHES`, and whether the model was in evaluation mode. It is
    in training mode unless that pass cannot be traced (for example because layers are dropped at random)."""

    def record_both(evaluating: bool) -> tuple[Dataflow, Dataflow, bool]:
        small, large = (record_dataflow(model, sample, size, equal_blocks, target, evaluating) for size in _BATCHES)
        if not _has_same_operators(small, large):  # a scripted function runs other operators at its first call
            small = record_dataflow(model, sample, _BATCHES[0], equal_blocks, target, evaluating)
        return small, large, evaluating

    try:
        return record_both(evaluating=False)
    except InputError as error_in_training:
        try:
            return record_both(evaluating=True)
        except InputError:
            raise error_in_training from None


def _has_same_operators(flow: Dataflow, other: Dataflow) -> bool:
    return [op.name for op in flow.operators] == [op.name for op in other.operators]


def _no_cut_reason(
    pieces: tuple[str, ...], cuts: tuple[Cut, ...], no_cuts: tuple[NoCut, ...], router: str | None
) -> str:
    if router is not None:
        return f"the values of tensors decide which modules of its list of experts {router or 'the model'} calls"
    if cuts:
        return ""
    if not no_cuts:
        return f"the model is one piece{f' ({pieces[0]})' if pieces else ''}: there is nothing to cut between"
    return f"no cut between {no_cuts[0].after} and {no_cuts[0].before}: {no_cuts[0].reason}"


def _ties(model: nn.Module) -> Iterator[Tie]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for group in names.values():
        if len(group) > 1:
            yield Tie(tuple(group), tuple(name.rpartition(".")[0] for name in group))


# ---- where the middle block cannot stand for the skipped ones


def _spans_blocks(group: SplitGroup, row: EqualBlocks) -> bool:
    """Whether a group splits modules of several blocks together. The skipped blocks would then belong to the group,
    too."""
    blocks = {next((b for b in row.blocks if is_inside(split.module, b)), None) for split in group.splits}
    return len(blocks) > 1


def _skips_neighbour(cut: Cut, row: EqualBlocks) -> bool:
    """Whether the result of a block is used after the next block. Results of skipped blocks would then cross the cut,
    too."""
    traced = (row.first, row.middle, row.last)
    for value in cut.crossing:
        block = next((block for block in traced if is_inside(value.module, block)), None)
        if block is not None and not is_inside(cut.after, block):
            return True
    return False


def _runs_between(name: str, order: tuple[str, ...], row: EqualBlocks) -> bool:
    """Whether a module outside of the blocks runs both before and after the middle block. It may then run between any
    two blocks, so the trace without the skipped blocks does not show all its calls. `order` has the names of all pieces
    in the order in which they run."""
    if any(is_inside(name, block) for block in row.blocks):
        return False
    positions = [position for position, other in enumerate(order) if is_inside(other, row.middle)]
    return bool(positions) and name in order[: positions[0]] and name in order[positions[-1] + 1 :]


# ---- repeating the findings of the middle block for the skipped blocks


def _repeat(
    items: Iterable[T],
    equal_blocks: tuple[EqualBlocks, ...],
    name_of: Callable[[T], str],
    rename: Callable[[T, dict[str, str]], T],
) -> tuple[T, ...]:
    """Returns the items in the order in which the model runs. Items of a middle block (their module is `name_of(item)`)
    are repeated for every block between the first and the last. `rename` copies an item; its dict maps the names of
    traced blocks to the names in the copy."""

    def row_of(item: T) -> EqualBlocks | None:
        return next((row for row in equal_blocks if is_inside(name_of(item), row.middle)), None)

    repeated: list[T] = []
    for row, group in groupby(items, key=row_of):
        members = list(group)
        if row is None:
            repeated += members
            continue
        # In the trace, the last block follows the middle block. Every other block is followed by its neighbour.
        for block, following in zip(row.blocks[1:-1], row.blocks[2:], strict=True):
            repeated += [rename(item, {row.middle: block, row.last: following}) for item in members]
    return tuple(repeated)


def _rename(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if is_inside(name, old):
            return new + name[len(old) :]
    return name


def _rename_in_group(group: SplitGroup, names: dict[str, str]) -> SplitGroup:
    name = _rename(group.name, names)
    splits = tuple(
        replace(s, module=_rename(s.module, names), parameter=_rename(s.parameter, names), group=name)
        for s in group.splits
    )
    return replace(group, name=name, splits=splits)


def _rename_in_cut(cut: Cut, names: dict[str, str]) -> Cut:
    crossing = tuple(
        replace(v, module=_rename(v.module, names), used_by=tuple(_rename(user, names) for user in v.used_by))
        for v in cut.crossing
    )
    return replace(cut, after=_rename(cut.after, names), before=_rename(cut.before, names), crossing=crossing)


def _rename_in_no_cut(no_cut: NoCut, names: dict[str, str]) -> NoCut:
    return replace(
        no_cut,
        after=_rename(no_cut.after, names),
        before=_rename(no_cut.before, names),
        module=_rename(no_cut.module, names),
    )


def _repeat_in_branches(branches: Branches, names: tuple[str, ...], equal_blocks: tuple[EqualBlocks, ...]) -> Branches:
    return replace(
        branches,
        branches=tuple(
            replace(branch, modules=outermost_modules(_repeat(branch.modules, equal_blocks, str, _rename), names))
            for branch in branches.branches
        ),
    )


def _plain(value: Any) -> Any:
    if isinstance(value, NoCut):
        return {"after": value.after, "before": value.before, "reason": value.reason}
    if isinstance(value, BatchDimension):
        return str(value)
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

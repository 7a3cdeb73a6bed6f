"""`Structure`: how a model can be split along the tensor axis, where it can be cut into stages, which of its branches
are independent and which weights are tied. Found once, for planner and runtime alike.

Two forward passes on fake tensors tell which module used what; of equal blocks three are traced, and what is found
in the middle one holds for all between.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, TypeVar

from torch import nn

from meshwright.blocks.module_names import enclosing, within
from meshwright.errors import InputError
from meshwright.profile.repeats import Run, find_runs
from meshwright.profile.structure.branches import Branches, collapsed, find_branches
from meshwright.profile.structure.cuts import Cut, NoCut, find_cuts
from meshwright.profile.structure.dataflow import Flow, record_flow
from meshwright.profile.structure.pieces import find_pieces
from meshwright.profile.structure.published_splits import with_published
from meshwright.profile.structure.splits import SplitGroup, find_splits
from meshwright.profile.structure.vocabulary import find_vocabulary
from meshwright.profile.structure.wide_layers import WideChain, find_wide_chains

_BATCHES = (2, 3)
T = TypeVar("T")


@dataclass(frozen=True)
class Tie:
    """Names of one parameter, and the modules that hold it."""

    parameters: tuple[str, ...]
    modules: tuple[str, ...]


@dataclass(frozen=True)
class Structure:
    """`pieces` are the modules that stages are made of, in the order they run. Where there are no cuts, `reason`
    says why. With `evaluated` it was found in evaluation: in training, chance or data decide what runs."""

    splits: tuple[SplitGroup, ...]
    wide: tuple[WideChain, ...]
    pieces: tuple[str, ...]
    cuts: tuple[Cut, ...]
    no_cuts: tuple[NoCut, ...]
    reason: str
    branches: tuple[Branches, ...]
    ties: tuple[Tie, ...]
    evaluated: bool = False

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """By group of `splits`, the first and the last of the `pieces` that its modules lie in."""
        numbers = {name: number for number, name in enumerate(self.pieces)}

        def piece_of(module: str) -> int:
            return min((numbers[name] for name in enclosing(module) if name in numbers), default=0)

        places = [[piece_of(split.module) for split in group.splits] for group in self.splits]
        return tuple((min(own, default=0), max(own, default=0)) for own in places)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, words and numbers, for YAML."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain


def structure(model: nn.Module, sample: Any, *, target: str | None = None, repeats: bool = True) -> Structure:
    """The structure of a model on batches like `sample`. With `repeats` off, every block is traced. The model may lie
    on the meta device; it is left as it is."""
    runs = find_runs(model) if repeats else ()
    try:
        flow, larger, evaluated = _flows(model, sample, runs, target)
    except IndexError as error:  # a model that counts its blocks itself misses those that were left out
        if not runs:
            raise InputError(f"the model cannot be traced: {error}") from error
        return structure(model, sample, target=target, repeats=False)
    if not _same_operators(flow, larger):
        raise InputError("the model runs other operators for other batch sizes: its structure cannot be told")
    pieces = find_pieces(model, flow)
    cuts, no_cuts = find_cuts(pieces, larger, _BATCHES)
    groups = find_splits(flow)
    groups = (*find_vocabulary(flow, groups), *groups)
    if (
        any(_reaches_far(cut, run) for cut in cuts for run in runs)
        or any(_spans_blocks(group, run) for group in groups for run in runs)
        or any(_runs_between(name, pieces.names, run) for name in set(pieces.names) for run in runs)
    ):
        return structure(model, sample, target=target, repeats=False)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    names = tuple(dict.fromkeys(_spread(pieces.names, runs, str, _renamed)))
    return Structure(
        splits=with_published(model, _spread(groups, runs, lambda group: group.name, _group)),
        wide=find_wide_chains(flow, parameters, lambda name: len(_spread([name], runs, str, _renamed))),
        pieces=names,
        cuts=_spread(cuts, runs, lambda cut: cut.after, _cut),
        no_cuts=_spread(no_cuts, runs, lambda found: found.after, _no_cut),
        reason=_reason(pieces.names, cuts, no_cuts),
        branches=tuple(_whole(found, names, runs) for found in find_branches(pieces)),
        ties=tuple(_ties(model)),
        evaluated=evaluated,
    )


def _flows(model: nn.Module, sample: Any, runs: tuple[Run, ...], target: str | None) -> tuple[Flow, Flow, bool]:
    """For two batch sizes, in training. Where chance decides what runs (layers dropped at random), in evaluation."""

    def both(evaluating: bool) -> tuple[Flow, Flow, bool]:
        small, large = (record_flow(model, sample, size, runs, target, evaluating) for size in _BATCHES)
        if not _same_operators(small, large):  # a scripted function runs others the first time
            small = record_flow(model, sample, _BATCHES[0], runs, target, evaluating)
        return small, large, evaluating

    try:
        return both(evaluating=False)
    except InputError as in_training:
        try:
            return both(evaluating=True)
        except InputError:
            raise in_training from None


def _same_operators(flow: Flow, other: Flow) -> bool:
    return [op.name for op in flow.ops] == [op.name for op in other.ops]


def _reason(pieces: tuple[str, ...], cuts: tuple[Cut, ...], no_cuts: tuple[NoCut, ...]) -> str:
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


# ---- what was found in the middle block holds for all between the first and the last


def _spread(
    items: Iterable[T], runs: tuple[Run, ...], name_of: Callable[[T], str], copy: Callable[[T, dict[str, str]], T]
) -> tuple[T, ...]:
    """What was found in the traced middle block, once for every block it stands for, in the order they run."""

    def home(item: T) -> Run | None:
        return next((run for run in runs if within(name_of(item), run.middle)), None)

    found: list[T] = []
    for run, together in groupby(items, key=home):
        bunch = list(together)
        if run is None:
            found += bunch
            continue
        # The traced middle block is followed by the last one; each of the others by its neighbour.
        for block, following in zip(run.blocks[1:-1], run.blocks[2:], strict=True):
            found += [copy(item, {run.middle: block, run.last: following}) for item in bunch]
    return tuple(found)


def _group(group: SplitGroup, names: dict[str, str]) -> SplitGroup:
    name = _renamed(group.name, names)
    splits = tuple(
        replace(s, module=_renamed(s.module, names), parameter=_renamed(s.parameter, names), group=name)
        for s in group.splits
    )
    return replace(group, name=name, splits=splits)


def _cut(cut: Cut, names: dict[str, str]) -> Cut:
    crossing = tuple(
        replace(v, module=_renamed(v.module, names), used_by=tuple(_renamed(user, names) for user in v.used_by))
        for v in cut.crossing
    )
    return replace(cut, after=_renamed(cut.after, names), before=_renamed(cut.before, names), crossing=crossing)


def _no_cut(found: NoCut, names: dict[str, str]) -> NoCut:
    reason = " ".join(_renamed(word, names) for word in found.reason.split(" "))
    return NoCut(_renamed(found.after, names), _renamed(found.before, names), reason)


def _spans_blocks(group: SplitGroup, run: Run) -> bool:
    """Whether modules of several blocks are split together: then the blocks between would be too."""
    homes = {next((b for b in run.blocks if within(s.module, b)), None) for s in group.splits}
    return len(homes) > 1


def _reaches_far(cut: Cut, run: Run) -> bool:
    """Whether a block's result is used behind its neighbour: then the blocks between would count too."""
    traced = (run.first, run.middle, run.last)
    for value in cut.crossing:
        home = next((block for block in traced if within(value.module, block)), None)
        if home is not None and not within(cut.after, home):
            return True
    return False


def _runs_between(name: str, order: tuple[str, ...], run: Run) -> bool:
    """Whether a module outside of the blocks runs between them, as often as there are blocks."""
    if any(within(name, block) for block in run.blocks):
        return False
    places = [place for place, other in enumerate(order) if within(other, run.middle)]
    return bool(places) and name in order[: places[0]] and name in order[places[-1] + 1 :]


def _whole(found: Branches, names: tuple[str, ...], runs: tuple[Run, ...]) -> Branches:
    branches = tuple(
        replace(branch, modules=collapsed(_spread(branch.modules, runs, str, _renamed), names))
        for branch in found.branches
    )
    return replace(found, branches=branches)


def _renamed(name: str, names: dict[str, str]) -> str:
    for old, new in names.items():
        if within(name, old):
            return new + name[len(old) :]
    return name


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

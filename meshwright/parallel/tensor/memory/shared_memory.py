"""Keeps shard views right when a model writes into tensors in place.

In plain PyTorch, views show the memory of their base: a write to one of them shows in all others. Where a function runs
on local tensors, their memory has the same property. It is lost in two places. A function that no rule covers runs on a
gathered copy of the full tensor, so what it writes, and what is later written into a view that it returned, would be
lost. And a local function may have to copy where torch would return a view. `SharedMemory` therefore remembers, for
each tensor of the unmodified model, which shard views and which gathered copies show its memory:

    a function writes into a gathered copy       the rank's part is written into the shard view        `write_back`
    a shard view is written                      gathered copies that the model still shows are        `note_writes`
                                                 gathered again
    the model writes into a view of a copy       noticed when a shard view of that memory is used      `refresh`
    the same, while it holds a view of another   an error, noticed when any shard view is used, or     `refuse_lost_`
    copy of that memory                          when the forward pass ends                            `writes`
    a shard view is written that another one     the other one is stale, and using it is an error      `refresh`
    shows, but without sharing local memory

Writes are recognized by the version counters of tensors, not by the names of functions.
"""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.parallel.tensor.memory.plain_effects import plain_aliases, plain_effects, storage_of
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.torch_private import (
    is_storage_shared,
    tree_flatten,
    tree_unflatten,
)
from meshwright.user.code import running_line


@dataclass(eq=False)
class GatheredCopy:
    """A full copy of a shard view, of which the model's code holds views. The versions are those of both tensors when
    they were equal."""

    view: ShardView
    full: Tensor
    full_version: int
    local_version: int

    @property
    def is_written(self) -> bool:
        """Whether the model has written into it since both tensors were equal."""
        return version(self.full) != self.full_version


class SharedMemory:
    """The shard views and gathered copies that show the memory of one tensor of the unmodified model."""

    def __init__(self) -> None:
        self.views: list[ref[ShardView]] = []
        self.copies: list[GatheredCopy] = []

    def others(self, view: ShardView) -> list[ShardView]:
        return [other for other in (reference() for reference in self.views) if other is not None and other is not view]

    def refresh(self, view: ShardView) -> None:
        refresh([view])


@dataclass(frozen=True)
class _TwoCopies:
    """Two gathered copies of one memory of which the model's code has held views at a time. `line` has taken the later
    of these views."""

    first: GatheredCopy
    second: GatheredCopy
    line: str


class _HeldTogether(threading.local):
    """Copies of which the model's code has held views at a time since the forward pass began."""

    def __init__(self) -> None:
        self.copies: list[_TwoCopies] = []


_HELD_TOGETHER = _HeldTogether()


def version(tensor: Tensor) -> int:
    """How often the tensor was written in place; -1 where this is not counted, in inference mode. Of a shard view, that
    of its local tensor."""
    while isinstance(tensor, ShardView):
        tensor = tensor.local_tensor
    return -1 if tensor.is_inference() else tensor._version


def shares_memory(result: Tensor, arguments: list[Any]) -> bool:
    """Whether the local result of a function shows the memory of one of its local arguments."""
    storage = storage_of(result)
    return any(isinstance(argument, Tensor) and storage_of(argument) == storage for argument in arguments)


def memory_of(view: ShardView) -> SharedMemory:
    if view.memory is None:
        view.memory = SharedMemory()
        view.memory.views.append(ref(view))
    memory: SharedMemory = view.memory
    return memory


def join_memory(source: ShardView, view: ShardView) -> None:
    """Notes that `view` shows memory of `source` in the unmodified model."""
    if source is view:
        return
    memory = memory_of(source)
    view.memory = memory
    memory.views = [reference for reference in memory.views if reference() is not None]
    memory.views.append(ref(view))


def refresh(views: Iterable[ShardView]) -> None:
    """Called before a function uses these views: takes over what the model has written into gathered copies of them.
    Raises an `InputError` for a view of which this is not possible."""
    refuse_lost_writes()
    for view in views:
        memory: SharedMemory | None = view.memory
        if memory is None:
            continue
        for copy in memory.copies:
            if version(copy.full) != copy.full_version:
                write_back(copy.view, copy.full)
                _follow_write(copy.view, copy)
        if view.stale_since is not None:
            raise _stale_error(view)


def refuse_lost_writes(*, at_end: bool = False) -> None:
    """Raises an `InputError` if the model has written into a view of one full copy of a memory while it held a view of
    another copy, where this does not show. Called before functions use shard views, and with `at_end` where a forward
    pass ends."""
    held = _HELD_TOGETHER.copies
    if not held:
        return
    _HELD_TOGETHER.copies = []
    for pair in held:
        if pair.first.is_written or pair.second.is_written:
            raise _lost_write_error(pair)
        if not at_end and is_storage_shared(pair.first.full) and is_storage_shared(pair.second.full):
            _HELD_TOGETHER.copies.append(pair)


def _lost_write_error(pair: _TwoCopies) -> InputError:
    group = pair.second.view.spec.group
    return InputError(
        f"{pair.line} takes a view of a tensor of which the model already holds another view, and writes into one of"
        f" them in place. The tensor is divided over the {group.size} ranks of the {group.axis} axis, and what is"
        f" written into one of these views does not show in the other: clone one of them, or set"
        f" plan.axes.{group.axis} to 1"
    )


def note_writes(views: Iterable[ShardView], versions: Iterable[int]) -> None:
    """Called after a function has run on local tensors of these views, which had these versions before."""
    for view, before in zip(views, versions, strict=True):
        if version(view) != before:
            view.gathered_copy = None
            _follow_write(view)


def _show_the_same(first: ShardView, second: ShardView) -> bool:
    """Whether what is written into one of these views is known to reach the other: their local tensors share memory, or
    are divided themselves, over another axis, and views of one full copy."""
    return not _local_storages(first).isdisjoint(_local_storages(second))


def _local_storages(view: ShardView) -> set[int]:
    local = view.local_tensor
    memory: SharedMemory | None = local.memory if isinstance(local, ShardView) else None
    return {storage_of(view)} | {storage_of(copy.full) for copy in (memory.copies if memory is not None else ())}


def _follow_write(written: ShardView, source: GatheredCopy | None = None) -> None:
    """Makes the other views and the gathered copies of the view's memory show what was written into it. `source` is the
    copy that it was written into first."""
    memory: SharedMemory | None = written.memory
    if memory is None:
        return
    reached = [written]
    for other in memory.others(written):
        other.gathered_copy = None
        if _show_the_same(other, written):
            if isinstance(other.local_tensor, ShardView):
                refresh([other.local_tensor])
            reached.append(other)
        elif other.stale_since is None:
            other.stale_since = running_line()
    for copy in memory.copies:
        if copy is not source and any(copy.view is view for view in reached):
            copy.full.copy_(copy.view.gathered())
        elif copy.view.stale_since is not None:  # the model may use views of the copy, which are ordinary tensors
            raise _stale_error(copy.view)
        copy.full_version, copy.local_version = version(copy.full), version(copy.view)


def _stale_error(view: ShardView) -> InputError:
    group = view.spec.group
    return InputError(
        f"{running_line()} uses a view of a tensor that was written at {view.stale_since}. The tensor is divided over"
        f" the {group.size} ranks of the {group.axis} axis, and this view does not show what was written: clone the"
        f" view before the write, or set plan.axes.{group.axis} to 1"
    )


def watch_copy(view: ShardView, full: Tensor) -> None:
    """Notes that the model's code holds a full copy of the view, or views of this copy."""
    memory = memory_of(view)
    copy = next((copy for copy in memory.copies if copy.full is full), None)
    if copy is None:
        copy = GatheredCopy(view, full, version(full), version(view))
        memory.copies.append(copy)
    for other in memory.copies:
        if storage_of(other.full) != storage_of(full) and is_storage_shared(other.full):
            _HELD_TOGETHER.copies.append(_TwoCopies(other, copy, running_line()))


def write_back(view: ShardView, full: Tensor) -> None:
    """Gives the view this rank's part of the full tensor."""
    part = view.part_of(full)
    view.gathered_copy = None
    if view.local_tensor.requires_grad and not part.requires_grad:  # written under `no_grad`: gradients pass it by
        with torch.no_grad():
            view.local_tensor.copy_(part)
    elif view.memory is not None and any(_show_the_same(other, view) for other in view.memory.others(view)):
        view.local_tensor.copy_(part)  # other views show this memory
    else:
        view.local_tensor = part


# ---- functions on local tensors


def shard_views(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[ShardView]:
    """The shard views among the arguments of a function, also those in lists."""
    views: list[ShardView] = []
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, ShardView):
            views.append(argument)
        elif isinstance(argument, list | tuple):
            views += [item for item in argument if isinstance(item, ShardView)]
    return views


def note_result(func: Any, leaves: list[Any], tree: Any, number: int, view: ShardView) -> None:
    """Called with the result of this number of a function that has run on local tensors, if it may show memory of an
    argument: makes the view share memory exactly if it would in the unmodified model."""
    storage = storage_of(view)
    sharing = [leaf for leaf in leaves if isinstance(leaf, ShardView) and storage_of(leaf) == storage]
    aliases = plain_aliases(func, leaves, tree)
    position = aliases[number] if number < len(aliases) else None
    if not aliases:  # unknown: local tensors behave as full ones do
        sources = sharing[:1]
    else:
        sources = [leaves[position]] if position is not None and isinstance(leaves[position], ShardView) else []
        if sharing and not sources:
            view.local_tensor = view.local_tensor.clone()
    for source in sources:
        join_memory(source, view)


# ---- functions on gathered copies


def call_on_gathered(
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    chosen: Callable[[ShardView], bool],
) -> Any:
    """Calls the function with full copies in the place of the chosen views, and keeps both equal: what the function
    writes is written into the views, and a result that shows the memory of a copy is remembered."""
    leaves, tree = tree_flatten((args, kwargs), is_leaf=_is_view)
    copies: dict[int, tuple[ShardView, Tensor]] = {}
    for leaf in leaves:
        if isinstance(leaf, ShardView) and chosen(leaf) and id(leaf) not in copies:
            shown = _copy_with_views(leaf)
            copies[id(leaf)] = (leaf, leaf.gathered() if shown is None else shown)
    versions = {key: version(full) for key, (_, full) in copies.items()}
    full_leaves = [copies[id(leaf)][1] if id(leaf) in copies else leaf for leaf in leaves]
    full_args, full_kwargs = tree_unflatten(full_leaves, tree)
    result = func(*full_args, **full_kwargs)
    for key, (view, full) in copies.items():
        written = version(full) != versions[key] if versions[key] >= 0 else _writes(func, leaves, tree, view)
        if written:
            write_back(view, full)
            _follow_write(view)
    return _remember(func, leaves, tree, result, copies)


def _copy_with_views(view: ShardView) -> Tensor | None:
    """The full copy of which the model holds views, so that what is written into a new view of it shows in those;
    None if there is no such copy with the present values."""
    memory: SharedMemory | None = view.memory
    with_gradient = view.local_tensor.requires_grad and torch.is_grad_enabled()
    for copy in memory.copies if memory is not None else ():
        is_current = (version(copy.full), version(view)) == (copy.full_version, copy.local_version)
        if copy.view is view and is_current and copy.full.requires_grad == with_gradient:
            return copy.full
    return None


def _remember(
    func: Any,
    leaves: list[Any],
    tree: Any,
    result: Any,
    copies: dict[int, tuple[ShardView, Tensor]],
) -> Any:
    """Returns the result, with a view in the place of its full copy. Adds the copies whose memory it shows to the
    memory of their views."""
    outputs, output_tree = tree_flatten(result, is_leaf=_is_view)
    storages = {storage_of(full): (view, full) for view, full in copies.values()}
    aliases: tuple[int | None, ...] | None = None
    for number, output in enumerate(outputs):
        if not isinstance(output, Tensor) or storage_of(output) not in storages:
            continue
        view, full = storages[storage_of(output)]
        if output is full:
            outputs[number] = view
            continue
        if aliases is None:
            aliases = plain_aliases(func, leaves, tree)
        position = aliases[number] if number < len(aliases) else None
        if position is not None and leaves[position] is view:
            watch_copy(view, full)
    return tree_unflatten(outputs, output_tree)


def _writes(func: Any, leaves: list[Any], tree: Any, view: ShardView) -> bool:
    """Whether the function writes into the view. Only asked where versions are not counted."""
    outcome = plain_effects(func, leaves, tree)
    position = next(number for number, leaf in enumerate(leaves) if leaf is view)
    if outcome is None:
        raise InputError(
            f"{running_line()} may write into a tensor that is divided over the ranks of the {view.spec.group.axis}"
            " axis, which cannot be followed in inference mode: use torch.no_grad instead"
        )
    return position in outcome[1]


def _is_view(tree: Any) -> bool:
    return isinstance(tree, ShardView)

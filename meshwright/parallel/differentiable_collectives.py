"""Collectives between the ranks of one mesh axis, each with the collective that its gradient needs.

A tensor is *replicated* if every rank holds the same values. *Replicated work* is computation that every rank repeats
on replicated tensors; its gradients are the same on every rank too. A tensor is *sharded* if each rank holds some index
ranges of one dimension. *Sharded work* is computation on shards, such as a layer with a sharded weight; each rank then
has only a part of the gradient of a replicated input, and the parts have to be summed. A tensor is a *partial sum* if
the result is the sum over the ranks' tensors. The tensor-parallel layers are built from these functions:

    forward                 backward                function
    identity                all-reduce              all_reduce_gradient             replicated → for sharded work
    all-reduce              identity                all_reduce                      partial sum → replicated
    slice                   all-gather              slice_own_shard                 replicated → sharded
    all-gather              slice                   all_gather_for_replicated_work  sharded → replicated
    all-gather              reduce-scatter          all_gather_for_sharded_work     sharded → full, for sharded work
    reduce-scatter          all-gather              reduce_scatter                  partial sum → sharded
    all-to-all              all-to-all              all_to_all                      sharded by one dim → by another

The functions whose names end in `_tensor` are the same collectives without autograd.

Gloo has neither reduce-scatter nor all-to-all for CUDA tensors. For these, an all-reduce replaces the reduce-scatter
and an all-gather of the whole tensor replaces the all-to-all; each rank keeps its shard of the result.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from meshwright.collectives.wait_clock import WAIT_CLOCK

IndexRanges = tuple[tuple[int, int], ...]  # (first index, length) of each range, in the order in which they are stored


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks of one mesh axis, seen from one of them.

    With `sequence_parallel`, row-parallel layers reduce-scatter their partial sums along the sequence instead of
    all-reducing them. `running_modules` is the stack of split modules whose `forward` is running, for messages.
    `local_calls` caches how each torch function runs on local tensors (tensor/dispatch.py).
    """

    process_group: dist.ProcessGroup
    rank: int
    size: int
    axis: str = "tensor"
    sequence_parallel: bool = False
    running_modules: list[str] = field(default_factory=list)
    local_calls: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ShardRanges:
    """How dimension `dim` of a tensor is sharded: `by_rank` has the index ranges that each rank holds of its `size`
    indices."""

    dim: int
    size: int
    by_rank: tuple[IndexRanges, ...]

    def length(self, rank: int) -> int:
        """The number of indices that the rank holds."""
        return sum(length for _, length in self.by_rank[rank])


def consecutive_ranges(dim: int, lengths: Sequence[int]) -> ShardRanges:
    """Returns the sharding in which rank 0 holds the first `lengths[0]` indices, rank 1 the next `lengths[1]`, and so
    on."""
    by_rank, first = [], 0
    for length in lengths:
        by_rank.append(((first, length),))
        first += length
    return ShardRanges(dim, first, tuple(by_rank))


def all_reduce_gradient(x: Tensor, group: AxisGroup) -> Tensor:
    return _apply(_AllReduceGradient, x, group) if _needs_gradient(x) else x


def all_reduce(x: Tensor, group: AxisGroup) -> Tensor:
    return _apply(_AllReduce, x, group)


def slice_own_shard(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    return _apply(_Redistribute, x, ranges, group, _own_slice, all_gather_tensor)


def all_gather_for_replicated_work(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    return _apply(_Redistribute, x, ranges, group, all_gather_tensor, _own_slice)


def all_gather_for_sharded_work(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    return _apply(_Redistribute, x, ranges, group, all_gather_tensor, reduce_scatter_tensor)


def reduce_scatter(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    return _apply(_Redistribute, x, ranges, group, reduce_scatter_tensor, all_gather_tensor)


def all_to_all(x: Tensor, source: ShardRanges, target: ShardRanges, group: AxisGroup) -> Tensor:
    """Returns a tensor that is sharded along `target.dim` and complete along `source.dim`, from `x`, which is sharded
    along `source.dim` and complete along `target.dim`."""
    return _apply(_AllToAll, x, source, target, group)


def average_gradient(x: Tensor, group: AxisGroup) -> Tensor:
    """Returns `x`. In the backward pass, the gradient, which is a sum over the samples of all ranks, is divided by the
    number of ranks."""
    return _apply(_ScaleGradient, x, 1 / group.size) if _needs_gradient(x) else x


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Returns `x`. In the backward pass, the gradient is multiplied by `factor`."""
    return _apply(_ScaleGradient, x, factor) if _needs_gradient(x) else x


def _apply(function: type[torch.autograd.Function], x: Tensor, *args: Any) -> Tensor:
    if has_torch_function_unary(x):  # a mode that records functions (tensor/local_graph.py)
        recorded: Tensor = handle_torch_function(_apply, (x,), function, x, *args)
        return recorded
    result: Tensor = function.apply(x, *args)
    return result


apply_collective = _apply  # the function that a recording mode is given for every collective of this file


def result_shape(function: Any, x: Tensor, *args: Any) -> tuple[int, ...]:
    """The shape of what `apply_collective` returns for these arguments."""
    shape = list(x.shape)
    if function is _Redistribute:
        ranges, group, forward, _ = args
        shape[ranges.dim] = ranges.size if forward is all_gather_tensor else ranges.length(group.rank)
    elif function is _AllToAll:
        source, target, group = args
        shape[source.dim], shape[target.dim] = source.size, target.length(group.rank)
    return tuple(shape)


def _needs_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


# ---- without autograd


def slice_of_rank(x: Tensor, ranges: ShardRanges, rank: int) -> Tensor:
    """The shard of `x` that the rank holds, as a contiguous copy."""
    slices = [x.narrow(ranges.dim, first, length) for first, length in ranges.by_rank[rank]]
    # Never a view, because the model may write to the shard in place.
    return torch.cat(slices, ranges.dim) if len(slices) > 1 else slices[0].clone(memory_format=torch.contiguous_format)


def _own_slice(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    return slice_of_rank(x, ranges, group.rank)


def _blocked() -> AbstractContextManager[None]:
    """Counts the time of a collective, except in code that is being compiled, where there is none."""
    return nullcontext() if torch.compiler.is_compiling() else WAIT_CLOCK.blocked()


def all_reduce_tensor(x: Tensor, group: AxisGroup) -> Tensor:
    """The sum over the ranks, as a new tensor."""
    total = x.contiguous().clone()
    with _blocked():
        dist.all_reduce(total, group=group.process_group)
    return total


def all_gather_tensor(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    """The full tensor, gathered from the shards of all ranks. Shorter shards are padded to the longest one, because
    backends want equal sizes."""
    longest = max(ranges.length(rank) for rank in range(group.size))
    shard = _padded(x, ranges.dim, longest)
    received = [torch.empty_like(shard) for _ in range(group.size)]
    with _blocked():
        dist.all_gather(received, shard, group=group.process_group)
    return concatenate_shards(received, ranges)


def concatenate_shards(shards: Sequence[Tensor], ranges: ShardRanges) -> Tensor:
    """The full tensor, put together from the (possibly padded) shards of all ranks."""
    slices: list[tuple[int, Tensor]] = []
    for index_ranges, shard in zip(ranges.by_rank, shards, strict=True):
        begin = 0
        for first, length in index_ranges:
            if length:
                slices.append((first, shard.narrow(ranges.dim, begin, length)))
            begin += length
    slices.sort(key=lambda item: item[0])
    if not slices:
        return shards[0].narrow(ranges.dim, 0, 0)
    return torch.cat([tensor for _, tensor in slices], ranges.dim)


def reduce_scatter_tensor(x: Tensor, ranges: ShardRanges, group: AxisGroup) -> Tensor:
    """This rank's shard of the sum over the ranks."""
    if not has_every_collective(x, group):
        return slice_of_rank(all_reduce_tensor(x, group), ranges, group.rank)
    longest = max(ranges.length(rank) for rank in range(group.size))
    shards = [_padded(slice_of_rank(x, ranges, rank), ranges.dim, longest) for rank in range(group.size)]
    summed = torch.empty_like(shards[0])
    with _blocked():
        dist.reduce_scatter(summed, shards, group=group.process_group)
    length = ranges.length(group.rank)
    # Never a view, because the model may write to the result in place, which autograd refuses for views.
    return summed if length == longest else summed.narrow(ranges.dim, 0, length).clone()


def _all_to_all_tensor(x: Tensor, source: ShardRanges, target: ShardRanges, group: AxisGroup) -> Tensor:
    if not has_every_collective(x, group):
        return slice_of_rank(all_gather_tensor(x, source, group), target, group.rank)
    sent = [slice_of_rank(x, target, rank).flatten() for rank in range(group.size)]
    shapes = []
    for rank in range(group.size):
        shape = list(x.shape)
        shape[source.dim], shape[target.dim] = source.length(rank), target.length(group.rank)
        shapes.append(shape)
    sizes = [prod(shape) for shape in shapes]
    flat = x.new_empty(sum(sizes))  # pieces of different sizes can only be received into one flat tensor
    with _blocked():
        dist.all_to_all_single(flat, torch.cat(sent), sizes, [len(piece) for piece in sent], group=group.process_group)
    received = [piece.view(shape) for piece, shape in zip(flat.split(sizes), shapes, strict=True)]
    return concatenate_shards(received, source)


def _padded(x: Tensor, dim: int, length: int) -> Tensor:
    if x.shape[dim] == length:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = length
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def has_every_collective(x: Tensor, group: AxisGroup) -> bool:
    """Whether the group's backend has reduce-scatter and all-to-all for this tensor's device."""
    return not x.is_cuda or dist.get_backend(group.process_group) == "nccl"


# ---- with autograd. The backward passes call functions with autograd, too, so that they can be differentiated again:
# by a loss on derivatives of the model's output, for example.


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce(grads[0], ctx.group), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return all_reduce_tensor(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_reduce_gradient(grads[0], ctx.group), None


_Collective = Callable[[Tensor, ShardRanges, AxisGroup], Tensor]


class _Redistribute(torch.autograd.Function):
    """Runs one collective in the forward pass and another in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ranges: ShardRanges, group: AxisGroup, forward: _Collective, backward: _Collective
    ) -> Tensor:
        ctx.ranges, ctx.group, ctx.collectives = ranges, group, (forward, backward)
        return forward(x, ranges, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        forward, backward = ctx.collectives
        return _apply(_Redistribute, grads[0], ctx.ranges, ctx.group, backward, forward), None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, source: ShardRanges, target: ShardRanges, group: AxisGroup) -> Tensor:
        ctx.source, ctx.target, ctx.group = source, target, group
        return _all_to_all_tensor(x, source, target, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_to_all(grads[0], ctx.target, ctx.source, ctx.group), None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None

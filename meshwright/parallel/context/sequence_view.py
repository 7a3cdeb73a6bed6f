"""`SequenceView`: a tensor of which each rank of the context axis holds some positions of the sequence, but which
reports the full shape.

Since it reports the full shape, model code sees the whole sequence: positions made by `torch.arange(length)`, masks and
targets that are shifted by one token are those of the whole sequence, and each rank takes its part of them where they
meet a divided tensor (dispatch.py). Nothing has to be moved by a rank's offset.

Gradients: a tensor that every rank has in full, such as a weight, a table of positions or the loss, has on each rank
only a part of its gradient; the sum over the context ranks is the gradient. So these operations are needed:

    forward                  backward                   function
    slice                    zeros around the slice     local_part        full → divided
    all-gather               reduce-scatter             gather            divided → full
    all-reduce               all-reduce                 sum_over_ranks    a part of a sum → the sum

A loss that is computed from full tensors is the same on every rank, and each rank starts its backward pass with 1. The
mean over the ranks, which is taken where data ranks average their gradients, is then the gradient.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

from torch import Tensor

from meshwright.errors import InputError
from meshwright.parallel.context.exchange import Exchange
from meshwright.parallel.differentiable_collectives import (
    AxisGroup,
    IndexRanges,
    ShardRanges,
    all_gather_for_sharded_work,
    all_reduce,
    all_reduce_gradient,
    slice_of_rank,
)
from meshwright.parallel.tensor.shard_view import ShardKind, ShardSpec, ShardView, full_tensor
from meshwright.parallel.torch_private import FakeTensor, register_pytree_node, tree_map
from meshwright.profile.structure.split_rules import DividedDimension


@dataclass(frozen=True)
class SequenceSpec(ShardSpec):
    """How a sequence is divided: `tokens` has the positions that each rank holds, in ascending order."""

    kind: ShardKind = "context"
    tokens: tuple[IndexRanges, ...] = ()
    exchange: Exchange = "all_gather"

    @property
    def length(self) -> int:
        """The number of positions of the whole sequence."""
        return sum(length for ranges in self.tokens for _, length in ranges)

    @property
    def ranges(self) -> ShardRanges:
        shard = self.shard
        period = shard.count * shard.inner
        by_rank = tuple(
            tuple(
                (begin * period + first * shard.inner, length * shard.inner)
                for begin in range(shard.outer)
                for first, length in ranges
            )
            for ranges in self.tokens
        )
        return ShardRanges(shard.dim, shard.outer * period, by_rank)

    def accepts(self, shard: DividedDimension) -> bool:
        """Whether a dimension can be divided this way. Only whole positions can be, so it must count positions."""
        return shard.count == self.length


class SequenceView(ShardView):
    """A rank's `local_tensor`, presented as the tensor of all positions. It may itself be a `ShardView` of the tensor
    axis. As a subclass of `ShardView` it is asked first about functions that are given both."""

    spec: SequenceSpec
    handler: ClassVar[Callable[..., Any] | None] = None  # dispatch.py sets it

    def gathered(self) -> Tensor:
        return gather(self)

    def part_of(self, full: Tensor) -> Tensor:
        return local_part(full, self.spec)


register_pytree_node(
    SequenceView,
    lambda view: ([view.local_tensor], (view.spec, tuple(view.shape))),
    lambda children, context: _unflattened(next(iter(children)), *context),
)


def _unflattened(leaf: Any, spec: SequenceSpec, shape: tuple[int, ...]) -> Any:
    return SequenceView(leaf, spec, shape) if isinstance(leaf, Tensor) else leaf


def balanced_tokens(length: int, ranks: int) -> tuple[IndexRanges, ...]:
    """The positions of each rank. The sequence is cut into 2 · ranks pieces, and rank r gets the pieces r and
    2 · ranks - 1 - r. In causal attention, where later positions attend to more keys, all ranks have equal work."""
    if length < 2 * ranks:
        raise InputError(
            f"plan.axes.context is {ranks}, which cuts a sequence into {2 * ranks} pieces, but a batch has sequences of"
            f" {length} tokens: use longer sequences, or set axes.context to {max(1, length // 2)} or less"
        )
    edges = [length * piece // (2 * ranks) for piece in range(2 * ranks + 1)]
    pieces = [(begin, end - begin) for begin, end in pairwise(edges)]
    return tuple((pieces[rank], pieces[2 * ranks - 1 - rank]) for rank in range(ranks))


def divide_sequence(x: Tensor, dim: int, group: AxisGroup, exchange: Exchange) -> SequenceView:
    """The tensor, which every rank has in full, divided along `dim`."""
    spec = sequence_spec(x.shape[dim], dim, group, exchange)
    return SequenceView(local_part(x, spec), spec, tuple(x.shape))


def sequence_spec(length: int, dim: int, group: AxisGroup, exchange: Exchange) -> SequenceSpec:
    """How a sequence of this length, which is dimension `dim` of a tensor, is divided."""
    shard = DividedDimension(dim, 1, length, 1)
    return SequenceSpec(shard, group, tokens=balanced_tokens(length, group.size), exchange=exchange)


def local_part(x: Tensor, spec: SequenceSpec) -> Tensor:
    """This rank's part of a full tensor."""
    return slice_of_rank(x, spec.ranges, spec.group.rank)


def gather(view: SequenceView) -> Tensor:
    """The full tensor on every rank. Of a `ShardView` of the tensor axis, the full positions of its local features."""
    local, spec = view.local_tensor, view.spec
    if isinstance(local, FakeTensor):  # of a module that runs in another pipeline stage
        return local.new_empty(tuple(view.shape))
    if isinstance(local, ShardView) and local.spec.shard.dim == spec.shard.dim:  # they divide positions, too
        local = full_tensor(local)
    if isinstance(local, ShardView):
        gathered = all_gather_for_sharded_work(local.local_tensor, spec.ranges, spec.group)
        return ShardView(gathered, local.spec, tuple(view.shape))
    return all_gather_for_sharded_work(local, spec.ranges, spec.group)


def sum_over_ranks(x: Tensor, group: AxisGroup) -> Tensor:
    # A copy, because autograd does not allow to write into the result of a custom function that shows its input.
    return all_reduce_gradient(all_reduce(x, group), group).clone()


def with_dim(spec: SequenceSpec, dim: int) -> SequenceSpec:
    """The spec of a tensor with the positions in dimension `dim`."""
    return replace(spec, shard=DividedDimension(dim, 1, spec.length, 1))


def is_sequence_view(tree: Any) -> bool:
    return isinstance(tree, SequenceView)


def gather_sequence_views(tree: Any) -> Any:
    """The same tree with full tensors in the place of sequence views."""

    def gathered(leaf: Any) -> Any:
        if isinstance(leaf, SequenceView) and leaf.memory is not None:
            leaf.memory.refresh(leaf)
        return gather(leaf) if isinstance(leaf, SequenceView) else leaf

    return tree_map(gathered, tree, is_leaf=is_sequence_view)

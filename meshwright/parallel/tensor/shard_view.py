"""`ShardView`: a tensor of which each rank holds a shard of one dimension, but which reports the full shape.

Since it reports the full shape, model code such as `q.view(B, T, heads, C // heads)` runs unmodified. It wraps a plain
local tensor with ordinary gradients: every torch function is run on that local tensor (dispatch.py), so the backward
pass is torch's own and needs no rules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import (
    AxisGroup,
    ShardRanges,
    all_gather_for_replicated_work,
    all_gather_for_sharded_work,
    all_to_all,
    consecutive_ranges,
    slice_own_shard,
)
from meshwright.parallel.torch_private import make_wrapper_subclass, register_pytree_node, tree_leaves, tree_map
from meshwright.parallel.weights.layout import shard_ranges
from meshwright.profile.structure.split_rules import DividedDimension
from meshwright.user.code import running_line

ShardKind = Literal["features", "vocabulary", "sequence", "context"]  # what the sharded dimension counts
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is sharded among the ranks of `group`.

    `fused_sizes` are the sizes of the slices of a fused layer's output (query, key, value), where these are not equal:
    each slice is sharded by itself, and `shard.outer` is 0. `samples_by_rank` is set over the replicate axis only,
    where the tensor holds the samples of all ranks: the number of samples that belong to each rank.
    """

    shard: DividedDimension
    group: AxisGroup
    kind: ShardKind = "features"
    fused_sizes: tuple[int, ...] = ()
    samples_by_rank: tuple[int, ...] = ()

    @property
    def ranges(self) -> ShardRanges:
        """The index ranges of the sharded dimension that each rank holds."""
        shard, ranks = self.shard, self.group.size
        slices = self.fused_sizes if shard.outer == 0 else (shard.count,) * shard.outer
        inner = 1 if shard.outer == 0 else shard.inner
        by_rank = tuple(
            tuple((first * inner, length * inner) for first, length in shard_ranges(slices, ranks, rank))
            for rank in range(ranks)
        )
        return ShardRanges(shard.dim, sum(slices) * inner, by_rank)

    def accepts(self, shard: DividedDimension) -> bool:
        """Whether a tensor that is divided by `shard` can have the parts of this spec."""
        return True

    def local_shape(self, full_shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of this rank's shard of a tensor of `full_shape`."""
        dim = self.shard.dim
        return (*full_shape[:dim], self.ranges.length(self.group.rank), *full_shape[dim + 1 :])


class ShardView(Tensor):
    """A rank's `local_tensor`, presented as the full tensor of which it is a shard.

    `gathered_copy` caches the result of `full_tensor_for_sharded_work`, with whether gradients were enabled then, and
    the version of the local tensor.
    `memory` is the `SharedMemory` (memory/) of views of this one, None if there are none. `stale_since` is the line
    that has written into a view of this one which does not share its local memory, None if there is none.
    """

    local_tensor: Tensor
    spec: ShardSpec
    gathered_copy: tuple[tuple[bool, int], Tensor] | None
    memory: Any
    stale_since: str | None
    handler: ClassVar[Handler | None] = None  # runs a torch function that is given shard views; dispatch.py sets it

    @staticmethod
    def __new__(cls: type["ShardView"], local_tensor: Tensor, spec: ShardSpec, shape: tuple[int, ...]) -> "ShardView":
        view: ShardView = make_wrapper_subclass(
            cls,
            shape,
            dtype=local_tensor.dtype,
            device=local_tensor.device,
            requires_grad=local_tensor.requires_grad,
        )
        view.local_tensor, view.spec, view.gathered_copy = local_tensor, spec, None
        view.memory, view.stale_since = None, None
        return view

    def __init__(self, local_tensor: Tensor, spec: ShardSpec, shape: tuple[int, ...]) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        assert cls.handler is not None, "parallel/tensor/__init__.py imports dispatch.py, which sets the handler"
        return cls.handler(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        leaves = tree_leaves((args, kwargs), is_leaf=is_shard_view)
        group = next(leaf.spec.group for leaf in leaves if isinstance(leaf, ShardView))
        raise InputError(
            f"torch calls {func} with a tensor that is divided over the {group.size} ranks of the {group.axis} axis,"
            f" behind {running_line()}, where no rule can follow it, such as in a checkpoint of the model's own inside"
            f" a block that the plan recomputes: set plan.memory.recompute to none, or plan.axes.{group.axis} to 1"
        )

    def gathered(self) -> Tensor:
        """The full tensor, for computation that all ranks repeat. If the local tensor of a view is a shard view itself,
        that one stays sharded."""
        return full_tensor(self)

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of a tensor that `gathered` has returned."""
        spec = self.spec
        if spec.samples_by_rank:
            return all_to_all(full, consecutive_ranges(0, spec.samples_by_rank), spec.ranges, spec.group)
        return slice_own_shard(full, spec.ranges, spec.group)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        group = self.spec.group
        return f"ShardView({tuple(self.shape)} by {self.spec.shard}, rank {group.rank} of {group.size})"


def is_shard_view(tree: Any) -> bool:
    return isinstance(tree, ShardView)


# FSDP2 registers its hooks on the tensors that it finds in a module's arguments and results. It must find the local
# tensor, because gradients flow through that one.
register_pytree_node(
    ShardView,
    lambda view: ([view.local_tensor], (view.spec, tuple(view.shape))),
    lambda children, context: _unflattened(next(iter(children)), *context),
)


def _unflattened(leaf: Any, spec: ShardSpec, shape: tuple[int, ...]) -> Any:
    """A tree map may have replaced the tensor by something else (torch 2.11 collects devices this way)."""
    return ShardView(leaf, spec, shape) if isinstance(leaf, Tensor) else leaf


def full_tensor(view: ShardView) -> Tensor:
    """The full tensor on every rank, for computation that all ranks repeat. Over the replicate axis: all features of
    this rank's samples, or a parameter, whose gradients differ from rank to rank with the samples, and are summed."""
    spec = view.spec
    if spec.samples_by_rank:
        own_samples = consecutive_ranges(0, spec.samples_by_rank)
        return all_to_all(view.local_tensor, spec.ranges, own_samples, spec.group)
    if spec.group.axis == "replicate":
        return all_gather_for_sharded_work(view.local_tensor, spec.ranges, spec.group)
    return all_gather_for_replicated_work(view.local_tensor, spec.ranges, spec.group)


def full_tensor_for_sharded_work(view: ShardView) -> Tensor:
    """The full tensor on every rank, as input of a sharded layer: its gradient is reduce-scattered. Layers that share
    the input share one all-gather."""
    local = view.local_tensor
    state = (torch.is_grad_enabled(), -1 if local.is_inference() else local._version)
    if view.gathered_copy is None or view.gathered_copy[0] != state:
        view.gathered_copy = (state, all_gather_for_sharded_work(local, view.spec.ranges, view.spec.group))
    return view.gathered_copy[1]


def gather_shard_views(tree: Any, kinds: tuple[ShardKind, ...] = ("features", "vocabulary", "sequence")) -> Any:
    """The same tree with full tensors in the place of shard views of these kinds. Applied to whatever leaves a model or
    a pipeline stage."""

    def gathered(leaf: Any) -> Any:
        if isinstance(leaf, ShardView) and leaf.memory is not None:
            leaf.memory.refresh(leaf)
        if isinstance(leaf, ShardView) and leaf.spec.kind == "context":  # its local tensor may be sharded, too
            return type(leaf)(gathered(leaf.local_tensor), leaf.spec, tuple(leaf.shape))
        return full_tensor(leaf) if isinstance(leaf, ShardView) and leaf.spec.kind in kinds else leaf

    return tree_map(gathered, tree, is_leaf=is_shard_view)

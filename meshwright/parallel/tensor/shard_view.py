"""`Part`: a tensor of which each rank holds its places of one dimension, and which looks whole to the model's code.

It tells the whole shape, so code that says `q.view(B, T, heads, C // heads)` runs unmodified, and it holds a plain
tensor with plain gradients: every function is run on that, as dispatch.py says, so backward needs no rules.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_map

from meshwright.parallel.exchange import Division, Team, even, gather, gather_in, scatter, swap
from meshwright.parallel.weights.layout import stretches
from meshwright.profile.structure.split_rules import Shard

Kind = Literal["features", "vocabulary", "sequence"]
Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is divided among the ranks of `team`. A fused layer's output whose parts are not equal
    (`shard.outer` is 0) has their sizes in `parts`. Over the replicate axis `samples` are the ranks' numbers of them:
    a part then holds those of all ranks."""

    shard: Shard
    team: Team
    kind: Kind = "features"
    parts: tuple[int, ...] = ()
    samples: tuple[int, ...] = ()

    @property
    def division(self) -> Division:
        shard, ranks = self.shard, self.team.ranks
        units = self.parts if shard.outer == 0 else (shard.count,) * shard.outer
        inner = 1 if shard.outer == 0 else shard.inner
        places = tuple(
            tuple((first * inner, length * inner) for first, length in stretches(units, ranks, rank))
            for rank in range(ranks)
        )
        return Division(shard.dim, sum(units) * inner, places)

    def local_shape(self, whole: tuple[int, ...]) -> tuple[int, ...]:
        dim = self.shard.dim
        return (*whole[:dim], self.division.length(self.team.rank), *whole[dim + 1 :])


class ShardView(Tensor):
    """Made of a rank's `local` tensor and of how it lies in the whole."""

    local: Tensor
    mark: ShardSpec
    entered: tuple[bool, Tensor] | None
    handler: ClassVar[Handler | None] = None  # runs a torch function that is given parts; dispatch.py sets it

    @staticmethod
    def __new__(cls: type["ShardView"], local: Tensor, mark: ShardSpec, shape: tuple[int, ...]) -> "ShardView":
        part: ShardView = Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, device=local.device, requires_grad=local.requires_grad
        )
        part.local, part.mark, part.entered = local, mark, None
        return part

    def __init__(self, local: Tensor, mark: ShardSpec, shape: tuple[int, ...]) -> None:
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
        raise NotImplementedError(f"{func} was given a part of a divided tensor behind torch's function protocol")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Part({tuple(self.shape)} by {self.mark.shard}, rank {self.mark.team.rank} of {self.mark.team.ranks})"


def is_part(tree: Any) -> bool:
    return isinstance(tree, ShardView)


# FSDP ties its hooks to the tensors in a module's arguments and results: it is to find the plain one, which gradients
# go through.
register_pytree_node(
    ShardView,
    lambda part: ([part.local], (part.mark, tuple(part.shape))),
    lambda children, context: _rebuilt(next(iter(children)), *context),
)


def _rebuilt(local: Any, mark: ShardSpec, shape: tuple[int, ...]) -> Any:
    """Trees are mapped to other things than tensors, too: torch 2.11 looks for devices so."""
    return ShardView(local, mark, shape) if isinstance(local, Tensor) else local


def whole(part: ShardView) -> Tensor:
    """The whole tensor on every rank, for work that all ranks do alike. Over the replicate axis: the whole features
    of this rank's own samples."""
    mark = part.mark
    if mark.samples:
        return swap(part.local, mark.division, even(0, mark.samples), mark.team)
    return gather(part.local, mark.division, mark.team)


def whole_in(part: ShardView) -> Tensor:
    """The whole tensor, for work that is divided among the ranks: its gradients are summed."""
    if part.entered is None or part.entered[0] != torch.is_grad_enabled():
        found = gather_in(part.local, part.mark.division, part.mark.team)
        part.entered = (torch.is_grad_enabled(), found)
    return part.entered[1]


def divided(tensor: Tensor, mark: ShardSpec) -> ShardView:
    """A whole tensor's part of this rank."""
    return ShardView(scatter(tensor, mark.division, mark.team), mark, tuple(tensor.shape))


def gathered(tree: Any, kinds: tuple[Kind, ...] = ("features", "vocabulary", "sequence")) -> Any:
    """The same tree with whole tensors for parts, as what leaves a model or a pipeline stage must be."""

    def made(leaf: Any) -> Any:
        return whole(leaf) if isinstance(leaf, ShardView) and leaf.mark.kind in kinds else leaf

    return tree_map(made, tree, is_leaf=is_part)

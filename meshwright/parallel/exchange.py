"""What the ranks of one axis hand each other in a forward pass, and what then goes back in the backward pass.

A tensor is *whole* where every rank holds the same one and goes on alike: its gradient is whole on every rank too. It
is *divided* where each rank holds its places of one dimension. With partial sums p_r that the ranks would add up:

    forward                    backward                          function
    x → x                      all-reduce                        copy_in     whole into work that is divided
    all-reduce p               g → g                             sum_out     partial sums to whole
    take own places            all-gather                        scatter     whole to divided
    all-gather                 take own places                   gather      divided to whole, all go on alike
    all-gather                 reduce-scatter                    gather_in   divided to whole, into divided work
    reduce-scatter p           all-gather                        sum_scatter partial sums to divided
    all-to-all                 all-to-all                        swap        divided by one dimension to another

Gloo has neither reduce-scatter nor all-to-all for CUDA tensors: there more is sent and the rest thrown away.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Places = tuple[tuple[int, int], ...]  # (first, length), one behind the other


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks of one axis, of which this is one. With `sequence`, partial sums are divided along the sequence rather
    than made whole. `running` are the names of the split modules being called, `decisions` what was found about how
    functions run on parts."""

    group: dist.ProcessGroup
    rank: int
    ranks: int
    axis: str = "tensor"
    sequence: bool = False
    running: list[str] = field(default_factory=list)
    decisions: dict[Any, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Division:
    """Which places of dimension `dim`, `size` long, each rank holds."""

    dim: int
    size: int
    places: tuple[Places, ...]

    def length(self, rank: int) -> int:
        return sum(length for _, length in self.places[rank])


def even(dim: int, lengths: Sequence[int]) -> Division:
    """One stretch a rank, in their order."""
    places, first = [], 0
    for length in lengths:
        places.append(((first, length),))
        first += length
    return Division(dim, first, tuple(places))


def copy_in(x: Tensor, team: Team) -> Tensor:
    return _apply(_CopyIn, x, team) if _has_gradient(x) else x


def sum_out(x: Tensor, team: Team) -> Tensor:
    return _apply(_SumOut, x, team)


def scatter(x: Tensor, division: Division, team: Team) -> Tensor:
    return _apply(_Move, x, division, team, "take", "gather")


def gather(x: Tensor, division: Division, team: Team) -> Tensor:
    return _apply(_Move, x, division, team, "gather", "take")


def gather_in(x: Tensor, division: Division, team: Team) -> Tensor:
    return _apply(_Move, x, division, team, "gather", "sum_take")


def sum_scatter(x: Tensor, division: Division, team: Team) -> Tensor:
    return _apply(_Move, x, division, team, "sum_take", "gather")


def swap(x: Tensor, held: Division, wanted: Division, team: Team) -> Tensor:
    """From a tensor that is whole but for `held` to one that is whole but for `wanted`."""
    return _apply(_Swap, x, held, wanted, team)


def averaged(x: Tensor, team: Team) -> Tensor:
    """The same; its gradient, the sum over the ranks' samples, becomes the mean."""
    return _apply(_Scale, x, 1 / team.ranks) if _has_gradient(x) else x


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)
    return result


def _has_gradient(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


# ---- without gradients


def take(x: Tensor, division: Division, rank: int) -> Tensor:
    pieces = [x.narrow(division.dim, first, length) for first, length in division.places[rank]]
    # Never a view: what comes of it may be written to in place.
    return (
        torch.cat(pieces, division.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
    )


def all_sum(x: Tensor, team: Team) -> Tensor:
    total = x.contiguous().clone()
    dist.all_reduce(total, group=team.group)
    return total


def all_gather(x: Tensor, division: Division, team: Team) -> Tensor:
    """The whole tensor. Shorter parts travel with room at their end: backends want equal sizes."""
    room = max(division.length(rank) for rank in range(team.ranks))
    mine = _filled(x, division.dim, room)
    received = [torch.empty_like(mine) for _ in range(team.ranks)]
    dist.all_gather(received, mine, group=team.group)
    return assembled(received, division)


def assembled(parts: Sequence[Tensor], division: Division) -> Tensor:
    pieces: list[tuple[int, Tensor]] = []
    for places, part in zip(division.places, parts, strict=True):
        begin = 0
        for first, length in places:
            if length:
                pieces.append((first, part.narrow(division.dim, begin, length)))
            begin += length
    pieces.sort(key=lambda piece: piece[0])
    if not pieces:
        return parts[0].narrow(division.dim, 0, 0)
    return torch.cat([piece for _, piece in pieces], division.dim)


def sum_take(x: Tensor, division: Division, team: Team) -> Tensor:
    if not _runs_all(x, team):
        return take(all_sum(x, team), division, team.rank)
    room = max(division.length(rank) for rank in range(team.ranks))
    parts = [_filled(take(x, division, rank), division.dim, room) for rank in range(team.ranks)]
    own = torch.empty_like(parts[0])
    dist.reduce_scatter(own, parts, group=team.group)
    return own.narrow(division.dim, 0, division.length(team.rank))


def _swapped(x: Tensor, held: Division, wanted: Division, team: Team) -> Tensor:
    if not _runs_all(x, team):
        return take(all_gather(x, held, team), wanted, team.rank)
    sent = [take(x, wanted, rank).flatten() for rank in range(team.ranks)]
    shapes = []
    for rank in range(team.ranks):
        shape = list(x.shape)
        shape[held.dim], shape[wanted.dim] = held.length(rank), wanted.length(team.rank)
        shapes.append(shape)
    sizes = [prod(shape) for shape in shapes]
    room = x.new_empty(sum(sizes))  # flat: only so may the pieces be of different sizes
    dist.all_to_all_single(room, torch.cat(sent), sizes, [len(piece) for piece in sent], group=team.group)
    received = [piece.view(shape) for piece, shape in zip(room.split(sizes), shapes, strict=True)]
    return assembled(received, held)


def _filled(x: Tensor, dim: int, room: int) -> Tensor:
    if x.shape[dim] == room:
        return x.contiguous()
    shape = list(x.shape)
    shape[dim] = room
    padded = x.new_zeros(shape)
    padded.narrow(dim, 0, x.shape[dim]).copy_(x)
    return padded


def _runs_all(x: Tensor, team: Team) -> bool:
    """Whether the backend runs every collective for this tensor."""
    return not x.is_cuda or dist.get_backend(team.group) == "nccl"


# ---- with gradients


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        ctx.team = team
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return all_sum(grads[0], ctx.team), None


class _SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, team: Team) -> Tensor:
        return all_sum(x, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], None


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, division: Division, team: Team, way: str, back: str) -> Tensor:
        ctx.division, ctx.team, ctx.back = division, team, back
        return _moved(x, division, team, way)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _moved(grads[0], ctx.division, ctx.team, ctx.back), None, None, None, None


class _Swap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Division, wanted: Division, team: Team) -> Tensor:
        ctx.held, ctx.wanted, ctx.team = held, wanted, team
        return _swapped(x, held, wanted, team)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _swapped(grads[0], ctx.wanted, ctx.held, ctx.team), None, None, None


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * ctx.factor, None


def _moved(x: Tensor, division: Division, team: Team, way: str) -> Tensor:
    if way == "take":
        return take(x, division, team.rank)
    return all_gather(x, division, team) if way == "gather" else sum_take(x, division, team)

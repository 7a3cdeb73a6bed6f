"""`Layout`: where a rank's part of a divided parameter lies in the whole one, so that its name and shape outlive a plan.

Along one dimension of size n, made of parts n1 + n2 + … (a fused layer; otherwise one part), rank r of t holds

    of each part nk the rows  [r · c, min((r + 1) · c, nk)),  c = ceil(nk / t)          stretches()
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Of a parameter of `shape`, this rank holds the `stretches` (first row, rows) of dimension `dim`, one behind the
    other; the other parts lie on the other ranks of the mesh's `axis`."""

    shape: tuple[int, ...]
    dim: int
    stretches: tuple[tuple[int, int], ...]
    axis: str
    parts: tuple[int, ...]


def lay_out(shape: Sequence[int], dim: int, parts: Sequence[int], axis: str, ranks: int, rank: int) -> Layout:
    """`parts` are the sizes that are divided each by itself; none stands for the whole dimension."""
    sizes = tuple(parts) or (shape[dim],)
    return Layout(tuple(shape), dim, stretches(sizes, ranks, rank), axis, sizes)


def stretches(parts: Sequence[int], ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    found, begin = [], 0
    for size in parts:
        chunk = -(-size // ranks)
        first = min(rank * chunk, size)
        found.append((begin + first, min(chunk, size - first)))
        begin += size
    return tuple(found)


def part_of(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's part, as a tensor of its own."""
    pieces = [whole.narrow(layout.dim, first, rows) for first, rows in layout.stretches]
    return torch.cat(pieces, layout.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)


def whole_of(part: Tensor, layout: Layout, group: dist.ProcessGroup) -> Tensor:
    """The whole parameter, from the parts of all ranks of the axis; all of them call it."""
    ranks = group.size()
    places = [stretches(layout.parts, ranks, rank) for rank in range(ranks)]
    rows = [sum(length for _, length in place) for place in places]
    room = list(part.shape)
    room[layout.dim] = max(rows)
    padded = part.new_zeros(room)
    padded.narrow(layout.dim, 0, part.shape[layout.dim]).copy_(part)
    received = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(received, padded, group=group)
    whole = part.new_empty(layout.shape)
    for place, piece in zip(places, received, strict=True):
        begin = 0
        for first, length in place:
            whole.narrow(layout.dim, first, length).copy_(piece.narrow(layout.dim, begin, length))
            begin += length
    return whole

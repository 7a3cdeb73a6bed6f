"""`Sketch`: what is written of a large tensor instead of all its elements.

A tensor is a matrix here, with a row for each index of its first dimension. Its sketch has the same rows, and in place
of columns it has *slots*: for each block of neighbouring columns the sum of the row's elements there, each times a
fixed sign, and a few columns as they are (*plain* columns). So a sketch is linear in the tensor: the sketch of a sum is
the sum of sketches, and a row that is 1% too long has a sketch that is 1% too long. Whatever the comparison does with
elements, it does with slots. Signs depend on the column alone, so that all ranks, and both trainings, use the same.

The sketch of a part is that of its elements, the others taken as zero. A block of which a rank holds only some columns
is completed by the other ranks' sums (`whole.py`)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from .parts import Region

_LEAST_BLOCK = 128  # columns, where there are so many that this makes more than `_LEAST_BLOCKS`
_LEAST_BLOCKS = 16
_PLAIN = 4
_MOST_SLOTS = 0.5  # of the columns; a matrix with more is written whole
_CHUNK = 2**24  # elements that are multiplied at once, which bounds the memory


@dataclass(frozen=True)
class Sketch:
    """The layout of the sketch of a whole tensor of a shape."""

    shape: tuple[int, ...]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[1:])

    @property
    def blocks(self) -> int:
        """A power of 2, so that a tensor divided into 2, 4, 8, … parts has no block in two parts."""
        return max(_LEAST_BLOCKS, 1 << max(0, (self.columns // _LEAST_BLOCK).bit_length() - 1))

    @property
    def size(self) -> tuple[int, int]:
        """The shape of the sketch."""
        return self.shape[0], self.blocks + _PLAIN

    @cached_property
    def starts(self) -> Tensor:
        """The first column of each block, and the number of columns."""
        return torch.arange(self.blocks + 1) * self.columns // self.blocks

    @cached_property
    def plain(self) -> Tensor:
        """The columns that are written as they are: some even, some odd."""
        numbers = torch.arange(_PLAIN)
        return (2 * numbers + 1) * self.columns // (2 * _PLAIN) - numbers % 2

    def columns_of(self, slot: int) -> tuple[int, int]:
        """The first and the last column that a slot is made of."""
        if slot >= self.blocks:
            column = int(self.plain[slot - self.blocks])
            return column, column
        return int(self.starts[slot]), int(self.starts[slot + 1]) - 1


def sketch_of(shape: tuple[int, ...], above: int | None) -> Sketch | None:
    """The sketch of a tensor that has more than `above` elements; None if it is written whole."""
    if above is None or len(shape) < 2 or math.prod(shape) <= above:
        return None
    sketch = Sketch(tuple(shape))
    return sketch if sketch.size[1] <= _MOST_SLOTS * sketch.columns else None


@dataclass(frozen=True)
class Piece:
    """A matrix of elements of a part: rows from `rows[0]` on, `rows[1]` of them in each of `row_blocks` equal blocks of
    all rows, and `columns`. `begin` is the index of its first element in the flattened part."""

    sketch: Sketch
    rows: tuple[int, int]
    row_blocks: int
    columns: Tensor
    begin: int

    @property
    def height(self) -> int:
        return self.rows[1] * self.row_blocks

    @cached_property
    def _blocks(self) -> tuple[Tensor, Tensor, Tensor]:
        """The touched blocks, the place of each column's block among them, and their numbers of columns here."""
        block = torch.searchsorted(self.sketch.starts, self.columns, right=True) - 1
        return torch.unique_consecutive(block, return_inverse=True, return_counts=True)

    @cached_property
    def _plain(self) -> tuple[Tensor, Tensor]:
        """The plain columns that are among this piece's, and where."""
        places = torch.searchsorted(self.columns, self.sketch.plain).clamp(max=len(self.columns) - 1)
        which = (self.columns[places] == self.sketch.plain).nonzero().reshape(-1)
        return which, places[which]

    @cached_property
    def _signs(self) -> Tensor:
        return _signs(self.columns).to(torch.float32)

    @property
    def slots(self) -> Tensor:
        return torch.cat([self._blocks[0], self.sketch.blocks + self._plain[0]])

    @property
    def held(self) -> list[tuple[int, ...]]:
        """For each slot, which columns it is summed over here if these are not all; () if they are all."""
        blocks, _, counts = self._blocks
        ends = counts.cumsum(0)
        held: list[tuple[int, ...]] = []
        for block, count, end in zip(blocks.tolist(), counts.tolist(), ends.tolist(), strict=True):
            first, last = self.sketch.columns_of(block)
            is_whole = count == last - first + 1
            held.append(() if is_whole else (int(self.columns[end - count]), int(self.columns[end - 1]), count))
        return held + [()] * len(self._plain[0])

    def of(self, part: Tensor) -> Tensor:
        """The sketch of this piece of the flattened part: a row for each row, and a column for each slot."""
        width = len(self.columns)
        matrix = part[self.begin : self.begin + self.height * width].view(self.height, width)
        wide = torch.float64 if matrix.dtype == torch.float64 else torch.float32
        signs = self._signs.to(matrix.device, wide)
        blocks, place, counts = self._blocks
        plain = self._plain[1].to(matrix.device)
        results = []
        rows = max(1, _CHUNK // max(1, width))
        even = bool((counts == counts[0]).all())
        for chunk in matrix.split(rows):
            signed = chunk.to(wide) * signs
            if even:
                sums = signed.view(len(chunk), len(blocks), -1).sum(-1)
            else:
                sums = signed.new_zeros(len(chunk), len(blocks)).index_add_(1, place.to(matrix.device), signed)
            results.append(torch.cat([sums, chunk[:, plain].to(wide)], 1))
        return torch.cat(results)


def _signs(columns: Tensor) -> Tensor:
    """+1 or -1 for each column, from the bits of its number."""
    mixed = (columns + 1) * 0x9E3779B1
    mixed = (mixed ^ (mixed >> 15)) * 0x85EBCA77 & 0x7FFFFFFFFFFF
    mixed = (mixed ^ (mixed >> 13)) * 0xC2B2AE3D & 0x7FFFFFFFFFFF
    return 1 - 2 * ((mixed >> 19) & 1)


@lru_cache(maxsize=4096)
def pieces_of(sketch: Sketch, region: Region) -> tuple[Piece, ...]:
    """The matrices that a region of the tensor consists of, in the order of the part's elements."""
    if region.flat is not None:
        return tuple(_flat_pieces(sketch, *region.flat))
    assert region.box is not None
    rows, box = region.box[0], region.box[1:]
    in_rows = region.blocks > 1 and region.dim == 0
    columns = torch.arange(sketch.columns).reshape(sketch.shape[1:])
    inner = Region(box=box) if in_rows else Region(box=box, dim=region.dim - 1, blocks=region.blocks)
    return (Piece(sketch, rows, region.blocks if in_rows else 1, inner.of(columns).reshape(-1), 0),)


def _flat_pieces(sketch: Sketch, start: int, end: int) -> Iterator[Piece]:
    """The end of a row, whole rows, and the beginning of a row."""
    width, at = sketch.columns, start
    while at < end:
        row, column = divmod(at, width)
        if column == 0 and end - at >= width:
            height, stop = (end - at) // width, width
        else:
            height, stop = 1, min(width, column + end - at)
        yield Piece(sketch, (row, height), 1, torch.arange(column, stop), at - start)
        at += height * (stop - column)


def sketch_part(sketch: Sketch, region: Region, part: Tensor) -> Tensor:
    """The sketch of a part: those of its pieces, one after the other, flattened. It is made where the part is."""
    flat = part.detach().reshape(-1)
    return torch.cat([piece.of(flat).reshape(-1) for piece in pieces_of(sketch, region) if piece.height])


def square_of(part: Tensor) -> Tensor:
    """The sum of the squares of a part's elements, in fp64 on the CPU."""
    total = torch.zeros((), dtype=torch.float64, device=part.device)
    for chunk in part.detach().reshape(-1).split(_CHUNK):
        wide = chunk if chunk.dtype == torch.float64 else chunk.to(torch.float32)
        total += wide.square().sum(dtype=torch.float64)
    return total.to("cpu")


@dataclass(frozen=True)
class HeldSlots:
    """Slots of some rows as one rank has them. `region` is theirs in the sketch. `held` says which of its block's
    columns a single slot is summed over, () for all."""

    region: Region
    value: Tensor
    held: tuple[int, ...] = ()


def read_sketch(sketch: Sketch, region: Region, written: Tensor) -> Iterator[HeldSlots]:
    """Cuts what `sketch_part` returned into regions of the sketch: runs of whole slots, and single slots of others."""
    at = 0
    for piece in pieces_of(sketch, region):
        slots, held = piece.slots.tolist(), piece.held
        matrix = written[at : at + piece.height * len(slots)].view(piece.height, len(slots))
        at += matrix.numel()
        first = 0
        for place in range(1, len(slots) + 1):
            ends = place == len(slots) or slots[place] != slots[place - 1] + 1 or held[place] or held[first]
            if ends and place > first:
                box = (piece.rows, (slots[first], place - first))
                region = Region(box=box, dim=0, blocks=piece.row_blocks)
                yield HeldSlots(region, matrix[:, first:place], held[first])
                first = place

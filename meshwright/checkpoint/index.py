"""The index of a checkpoint (index.json): which tensors it holds, in which pieces of which files, and its small
objects. A piece is the bytes of one region of a tensor, row by row."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator, model_validator

from meshwright.checkpoint.chunks import Box, overlap
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError

INDEX = "index.json"

# The dtypes that can be saved, by torch's name: those whose elements are whole bytes that torch can copy. torch also
# has names for quantized numbers, for bits without a meaning, and for integers of fewer than eight bits.
_NUMBER = re.compile(r"bool|u?int(8|16|32|64)|b?float\d+.*|complex\d+")
DTYPES: dict[str, torch.dtype] = {
    torch_name(dtype): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and _NUMBER.fullmatch(torch_name(dtype))
}


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Piece(_Section):
    """The region of a tensor that begins at `offsets` and has `sizes`, and the place of its bytes: they begin at byte
    `begin` of a file."""

    offsets: list[NonNegativeInt]
    sizes: list[NonNegativeInt]
    file: str
    begin: NonNegativeInt

    @property
    def box(self) -> Box:
        return tuple(self.offsets), tuple(self.sizes)


class SavedTensor(_Section):
    """One whole tensor, and the pieces of it. `dtype` is torch's name, such as "float32"."""

    dtype: str
    shape: list[NonNegativeInt]
    pieces: list[Piece]

    @field_validator("dtype")
    @classmethod
    def _is_dtype(cls, name: str) -> str:
        if name not in DTYPES:
            raise ValueError(f"{name!r:.50} is no dtype that can be saved")
        return name

    @model_validator(mode="after")
    def _pieces_fill_the_shape(self) -> Self:
        for piece in self.pieces:
            if not len(piece.offsets) == len(piece.sizes) == len(self.shape):
                raise ValueError("a piece has another number of dimensions than its tensor")
            if any(b + n > size for b, n, size in zip(piece.offsets, piece.sizes, self.shape, strict=True)):
                raise ValueError("a piece is outside of its tensor")
        if sum(math.prod(piece.sizes) for piece in self.pieces) != math.prod(self.shape):
            raise ValueError("the pieces are not the whole tensor")
        if len(self.pieces) > 1 and any_overlap([piece.box for piece in self.pieces]):
            raise ValueError("two pieces have the same element")
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def bytes_of(self, piece: Piece) -> int:
        return math.prod(piece.sizes) * self.torch_dtype.itemsize

    def converts_to(self, dtype: str) -> bool:
        """Whether the tensor may be loaded into one of this dtype: the same, or numbers of the same kind with another
        number of bytes, such as float32 into bfloat16. Another dtype of the same size is refused: the same bytes mean
        other numbers there."""
        saved, wanted = self.torch_dtype, DTYPES.get(dtype)
        if wanted is None or saved == wanted:
            return saved == wanted
        return _kind(saved) == _kind(wanted) and saved.itemsize != wanted.itemsize


class Index(_Section):
    """`objects` are plain values in the form of `plain_values.to_json`."""

    tensors: dict[str, SavedTensor]
    objects: dict[str, Any]


def parse_index(text: str | bytes, folder: Path) -> Index:
    """Returns the index that a text is. Raises a `CheckpointError` if it is none."""
    try:
        return Index.model_validate_json(text)
    except (ValidationError, RecursionError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else "it is nested too deeply"
        raise CheckpointError(f"{folder}: its {INDEX} is damaged: {reason}") from None


def check_places(index: Index, bytes_of_file: Callable[[str], int], folder: Path) -> None:
    """Raises a `CheckpointError` if a piece is not inside of its file, or if two pieces share bytes. `bytes_of_file`
    returns the size of a file, or -1 if there is none of that name."""
    places: dict[str, list[tuple[int, int, str]]] = {}
    for key, tensor in index.tensors.items():
        for piece in tensor.pieces:
            end = piece.begin + tensor.bytes_of(piece)
            places.setdefault(piece.file, []).append((piece.begin, end, key))
    for file, pieces in places.items():
        size, previous = bytes_of_file(file), 0
        for begin, end, key in sorted(pieces):
            if end > size:
                raise CheckpointError(f"{folder}: its {INDEX} is damaged: {key:.100} is outside of {file:.100}")
            if begin < previous and end > begin:
                raise CheckpointError(f"{folder}: its {INDEX} is damaged: {key:.100} has the bytes of another tensor")
            previous = max(previous, end)


def any_overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two regions share an element. A tensor may have thousands of regions, so not all pairs are compared:
    along the dimension with the most different offsets, each region is compared with those that reach its offset."""
    filled = [box for box in boxes if all(box[1])]
    dims = range(len(filled[0][0])) if filled else ()
    dim = max(dims, key=lambda dim: len({offsets[dim] for offsets, _ in filled}), default=None)
    if dim is None:  # scalars, which have one element; or no region has any
        return len(filled) > 1
    near: list[Box] = []
    for box in sorted(filled, key=lambda box: box[0][dim]):
        near = [other for other in near if other[0][dim] + other[1][dim] > box[0][dim]]
        if any(overlap(box, other) is not None for other in near):
            return True
        near.append(box)
    return False


def _kind(dtype: torch.dtype) -> tuple[bool, bool, bool]:
    return dtype.is_floating_point, dtype.is_complex, dtype == torch.bool

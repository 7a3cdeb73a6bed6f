"""The index of a checkpoint (index.json): which tensors it holds, in which pieces of which files, and its small
objects. A piece is the bytes of one region of a tensor, row by row."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError, field_validator, model_validator

from meshwright.checkpoint.chunks import Box
from meshwright.errors import CheckpointError

INDEX = "index.json"


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
        if not isinstance(getattr(torch, name, None), torch.dtype):
            raise ValueError(f"{name!r:.50} is no dtype")
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
        return self

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def bytes_of(self, piece: Piece) -> int:
        return math.prod(piece.sizes) * self.torch_dtype.itemsize


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


def read_index(folder: Path, file_bytes: Mapping[str, int]) -> Index:
    """Reads the index. Raises a `CheckpointError` if it is damaged, or if a piece is not inside of one of the files,
    whose sizes `file_bytes` are."""
    if INDEX not in file_bytes:  # then it has no checksum
        raise CheckpointError(f"{folder}: its manifest does not have {INDEX}")
    try:
        index = parse_index((folder / INDEX).read_bytes(), folder)
    except OSError as error:
        raise CheckpointError(f"{folder}: its {INDEX} cannot be read: {error.strerror}") from None
    needed = 0
    for key, tensor in index.tensors.items():
        for piece in tensor.pieces:
            needed += tensor.bytes_of(piece)
            if piece.begin + tensor.bytes_of(piece) > file_bytes.get(piece.file, -1):
                raise CheckpointError(f"{folder}: its {INDEX} is damaged: {key:.100} is outside of {piece.file:.100}")
    if needed > sum(file_bytes.values()):  # pieces that overlap could make a small file fill all memory
        raise CheckpointError(f"{folder}: its {INDEX} is damaged: its tensors are larger than its files")
    return index

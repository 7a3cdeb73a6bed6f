"""Divides the contents of a checkpoint among the ranks that write it, and writes the file of one rank.

If several ranks hold the same region of a tensor, only one of them writes it: the one with the fewest bytes so far.
"""

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.chunks import Box, ChunkedTensor, chunks_of
from meshwright.checkpoint.index import Piece, SavedTensor
from meshwright.checkpoint.manifest import FileChecksum
from meshwright.checkpoint.state import State
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError
from meshwright.files.storage import writing
from meshwright.plain_values import NotPlainError, tensor_bytes, to_json

_ALIGNMENT = 64  # every piece begins at a multiple of this many bytes, so that it can be mapped into memory


@dataclass(frozen=True)
class WritePlan:
    """What each rank writes: `pieces` by rank and tensor, `tensors` by key for the index, and `objects` by rank.
    `bytes_of_rank` are the sizes of the files."""

    tensors: dict[str, SavedTensor]
    pieces: list[list[tuple[str, Piece]]]
    objects: list[list[str]]
    bytes_of_rank: list[int]


def describe(state: State) -> dict[str, Any]:
    """Returns what this rank holds, as a plain value: dtype, shape and regions of each tensor, and the keys of the
    objects. Raises a `CheckpointError` if a tensor cannot be saved."""
    tensors = {}
    for key, value in state.items():
        if isinstance(value, ChunkedTensor | Tensor):
            tensor = value.tensor if isinstance(value, ChunkedTensor) else value
            if tensor.layout != torch.strided or tensor.is_quantized:
                raise CheckpointError(f"{key} is not a dense tensor: only dense tensors can be saved")
            boxes = [[list(offsets), list(sizes)] for offsets, sizes in chunks_of(value)]
            tensors[key] = [torch_name(tensor.dtype), list(value.shape), boxes]
    return {"tensors": tensors, "objects": [key for key in state if key not in tensors]}


def check_savable(state: State) -> None:
    """Raises a `CheckpointError` if this rank's state holds anything that cannot be saved."""
    objects_as_json(state, describe(state)["objects"])


def plan_files(descriptions: Sequence[Mapping[str, Any]]) -> WritePlan:
    """Divides the pieces and objects among the ranks. `descriptions` are those of all ranks. Every rank calls this with
    the same descriptions, and gets the same result."""
    holders: dict[str, dict[Box, list[int]]] = {}
    kinds: dict[str, tuple[str, list[int]]] = {}
    object_holders: dict[str, int] = {}
    for rank, description in enumerate(descriptions):
        for key, (dtype, shape, boxes) in description["tensors"].items():
            kinds[key] = (dtype, shape)
            for offsets, sizes in boxes:
                holders.setdefault(key, {}).setdefault((tuple(offsets), tuple(sizes)), []).append(rank)
        for key in description["objects"]:
            object_holders.setdefault(key, rank)
    ends = [0] * len(descriptions)
    pieces: list[list[tuple[str, Piece]]] = [[] for _ in descriptions]
    tensors: dict[str, SavedTensor] = {}
    for key, (dtype, shape) in kinds.items():
        saved: list[Piece] = []
        for (offsets, sizes), ranks in holders.get(key, {}).items():
            rank = min(ranks, key=lambda rank: (ends[rank], rank))
            begin = -(-ends[rank] // _ALIGNMENT) * _ALIGNMENT
            piece = Piece(offsets=list(offsets), sizes=list(sizes), file=file_name(rank), begin=begin)
            ends[rank] = begin + math.prod(sizes) * getattr(torch, dtype).itemsize
            pieces[rank].append((key, piece))
            saved.append(piece)
        tensors[key] = SavedTensor(dtype=dtype, shape=shape, pieces=saved)
    objects = [[key for key, holder in object_holders.items() if holder == rank] for rank in range(len(descriptions))]
    return WritePlan(tensors, pieces, objects, ends)


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


def write_pieces(path: Path, state: State, pieces: Sequence[tuple[str, Piece]], size: int) -> FileChecksum:
    """Writes this rank's pieces, which have `size` bytes, to a file. Returns its size and checksum."""
    digest = hashlib.sha256()
    chunks: dict[str, dict[Box, Tensor]] = {}
    with writing(path, size), path.open("wb") as file:
        for key, piece in pieces:
            if key not in chunks:
                chunks = {key: chunks_of(state[key])}
            padding = bytes(piece.begin - file.tell())
            data = tensor_bytes(chunks[key][piece.box]).numpy().data
            for part in (padding, data):
                file.write(part)
                digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return FileChecksum(bytes=file.tell(), sha256=digest.hexdigest())


def objects_as_json(state: State, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the objects of these keys for the index. Raises a `CheckpointError` if one of them is not plain."""
    try:
        return {key: to_json(state[key], key) for key in keys}
    except NotPlainError as error:
        raise CheckpointError(
            f"{error}, which cannot be saved: a checkpoint holds tensors, numbers, texts and containers of them, but"
            " no other objects, because reading them back could execute code"
        ) from None

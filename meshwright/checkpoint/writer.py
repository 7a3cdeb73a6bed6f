"""Divides the contents of a checkpoint among the ranks that write it, and writes the file of one rank.

If several ranks hold the same region of a tensor, only one of them writes it: the one with the fewest bytes so far.
"""

import hashlib
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.chunks import Box, ChunkedTensor, chunks_of
from meshwright.checkpoint.index import DTYPES
from meshwright.checkpoint.manifest import FileChecksum
from meshwright.checkpoint.state import State
from meshwright.dtypes import PIECE_ALIGNMENT, torch_name
from meshwright.errors import CheckpointError
from meshwright.files.storage import writing
from meshwright.messages.plain_values import NotPlainError, tensor_bytes, to_json

_BLOCK = 2**22  # bytes that are written at once


@dataclass(frozen=True)
class RankShare:
    """What one rank writes: the pieces of its file in their order (key of the tensor, offsets, sizes, and where the
    piece begins in the file), the size of that file, and the keys of objects."""

    pieces: list[tuple[str, tuple[int, ...], tuple[int, ...], int]]
    size: int
    objects: list[str]


@dataclass(frozen=True)
class WritePlan:
    """What all ranks write: `tensors` by key, as they are written into the index, and the share of each rank."""

    tensors: dict[str, dict[str, Any]]
    shares: list[RankShare]


def describe(state: State) -> str:
    """Returns what this rank holds as a text for `plan_files`: dtype, shape and regions of each tensor, and the keys of
    the objects. Raises a `CheckpointError` if a tensor cannot be saved."""
    tensors = {}
    for key, value in state.items():
        if isinstance(value, ChunkedTensor | Tensor):
            tensor = value.tensor if isinstance(value, ChunkedTensor) else value
            if tensor.layout != torch.strided or torch_name(tensor.dtype) not in DTYPES:
                raise CheckpointError(f"{key} is not a dense tensor of numbers: only such tensors can be saved")
            tensors[key] = [torch_name(tensor.dtype), list(value.shape), list(chunks_of(value))]
    return json.dumps({"tensors": tensors, "objects": object_keys(state)})


def object_keys(state: State) -> list[str]:
    """The keys of what is saved as an object and not as a tensor."""
    return [key for key, value in state.items() if not isinstance(value, ChunkedTensor | Tensor)]


def plan_files(descriptions: Sequence[str]) -> WritePlan:
    """Divides the pieces and objects among the ranks. `descriptions` are what `describe` returned on each rank. Raises
    a `CheckpointError` if ranks hold different tensors under one name. That the pieces of a tensor are the whole tensor
    is checked when the index is complete."""
    holders: dict[str, dict[Box, list[int]]] = {}
    kinds: dict[str, list[Any]] = {}
    object_holders: dict[str, int] = {}
    for text, ranks in _ranks_by_description(descriptions).items():
        description = json.loads(text)
        for key, (dtype, shape, boxes) in description["tensors"].items():
            first = kinds.setdefault(key, [dtype, shape])
            if first != [dtype, shape]:
                raise CheckpointError(
                    f"{key} is {dtype} {tuple(shape)} on rank {ranks[0]}, but {first[0]} {tuple(first[1])} on another"
                    " rank: it must be the same tensor on all ranks"
                )
            holders_of_box = holders.setdefault(key, {})
            for offsets, sizes in boxes:
                holders_of_box.setdefault((tuple(offsets), tuple(sizes)), []).extend(ranks)
        for key in description["objects"]:
            object_holders.setdefault(key, ranks[0])
    shares = [RankShare([], 0, []) for _ in descriptions]
    ends, names = [0] * len(descriptions), [file_name(rank) for rank in range(len(descriptions))]
    tensors: dict[str, dict[str, Any]] = {}
    for key, (dtype, shape) in kinds.items():
        pieces = []
        for (offsets, sizes), ranks in holders[key].items():
            rank = min(ranks, key=lambda rank: (ends[rank], rank))
            begin = -(-ends[rank] // PIECE_ALIGNMENT) * PIECE_ALIGNMENT
            ends[rank] = begin + math.prod(sizes) * DTYPES[dtype].itemsize
            shares[rank].pieces.append((key, offsets, sizes, begin))
            pieces.append({"offsets": offsets, "sizes": sizes, "file": names[rank], "begin": begin})
        tensors[key] = {"dtype": dtype, "shape": shape, "pieces": pieces}
    for key, rank in object_holders.items():
        shares[rank].objects.append(key)
    return WritePlan(tensors, [replace(share, size=end) for share, end in zip(shares, ends, strict=True)])


def share_to_text(share: RankShare) -> str:
    """Returns a share as a text that `read_share` reads, for a message to its rank."""
    return json.dumps([share.pieces, share.size, share.objects])


def read_share(text: str) -> RankShare:
    """Returns the share that `share_to_text` wrote."""
    pieces, size, objects = json.loads(text)
    with_tuples = [(key, tuple(offsets), tuple(sizes), begin) for key, offsets, sizes, begin in pieces]
    return RankShare(with_tuples, size, objects)


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"rank-{rank:05d}.bin"


def write_pieces(path: Path, state: State, share: RankShare) -> FileChecksum:
    """Writes the pieces of this rank's share to a file. Returns its size and checksum."""
    digest = hashlib.sha256()
    chunks: dict[str, dict[Box, Tensor]] = {}
    with writing(path, share.size), path.open("wb") as file:
        for key, offsets, sizes, begin in share.pieces:
            if key not in chunks:
                chunks = {key: chunks_of(state[key])}
            padding = bytes(begin - file.tell())
            data = tensor_bytes(chunks[key][offsets, sizes]).numpy().data
            for part in (padding, data):
                file.write(part)
                digest.update(part)
        file.flush()
        os.fsync(file.fileno())
        return FileChecksum(bytes=file.tell(), sha256=digest.hexdigest())


def copy_pieces(state: State, share: RankShare, file: Tensor) -> None:
    """Copies the pieces of this rank's share to the memory `file`, which then has the bytes of the file that
    `write_pieces` would write."""
    chunks: dict[str, dict[Box, Tensor]] = {}
    end = 0
    for key, offsets, sizes, begin in share.pieces:
        if key not in chunks:
            chunks = {key: chunks_of(state[key])}
        chunk = chunks[key][offsets, sizes]
        file[end:begin] = 0
        end = begin + chunk.numel() * chunk.element_size()
        if chunk.device.type == "cpu":
            file[begin:end] = tensor_bytes(chunk)
        else:  # straight to this memory, which is pinned
            file[begin:end].view(chunk.dtype).copy_(chunk.detach().resolve_conj().resolve_neg().reshape(-1))


def write_copied(path: Path, file: Tensor) -> FileChecksum:
    """Writes the bytes that `copy_pieces` has copied. Returns their number and checksum."""
    data = file.numpy().data
    digest = hashlib.sha256()
    with writing(path, len(data)), path.open("wb", buffering=0) as target:
        for begin in range(0, len(data), _BLOCK):
            block = data[begin : begin + _BLOCK]
            while block:
                written = target.write(block)
                digest.update(block[:written])
                block = block[written:]
        os.fsync(target.fileno())
        return FileChecksum(bytes=target.tell(), sha256=digest.hexdigest())


def objects_as_json(state: State, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the objects of these keys for the index. Raises a `CheckpointError` if one of them is not plain."""
    try:
        return {key: to_json(state[key], key) for key in keys}
    except NotPlainError as error:
        raise CheckpointError(
            f"{error}, which cannot be saved: a checkpoint holds tensors, numbers, texts and containers of them, but"
            " no other objects, because reading them back could execute code"
        ) from None


def _ranks_by_description(descriptions: Sequence[str]) -> dict[str, list[int]]:
    """The ranks that hold the same, as replicas do, so that what they hold is read once."""
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(descriptions):
        ranks.setdefault(text, []).append(rank)
    return ranks

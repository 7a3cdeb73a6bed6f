"""Reads the tensors and objects of a checkpoint. `open_checkpoint` returns the reader for the format of a folder: the
one that save.py writes, or the older one of torch.distributed.checkpoint (dcp_format.py). Neither executes code."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import torch
from torch import Tensor

from meshwright.checkpoint.chunks import Box, narrow, overlap
from meshwright.checkpoint.dcp_format import METADATA, DcpCheckpoint
from meshwright.checkpoint.index import INDEX, Index, Piece, SavedTensor, read_index
from meshwright.checkpoint.manifest import Manifest, read_manifest, verify_files
from meshwright.errors import CheckpointError
from meshwright.plain_values import DamagedValueError, from_json


class CheckpointReader(Protocol):
    """An opened checkpoint. `tensors` are those it holds, and `objects` the values that are not tensors, by key."""

    @property
    def tensors(self) -> Mapping[str, SavedTensor]: ...

    @property
    def objects(self) -> Mapping[str, Any]: ...

    def read_piece(self, key: str, piece: Piece, first_row: int, rows: int) -> Tensor:
        """Returns `rows` rows of a piece of the tensor `key` from the piece's row `first_row` on. A piece without
        dimensions has one row."""
        ...

    def close(self) -> None: ...


class RawCheckpoint:
    """A checkpoint whose pieces are raw bytes."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        index: Index = read_index(folder, {name: checksum.bytes for name, checksum in manifest.files.items()})
        self.tensors = index.tensors
        try:
            self.objects = {key: from_json(value) for key, value in index.objects.items()}
        except (DamagedValueError, RecursionError) as error:
            raise CheckpointError(f"{folder}: its {INDEX} is damaged: {error}") from None

    def read_piece(self, key: str, piece: Piece, first_row: int, rows: int) -> Tensor:
        tensor = self.tensors[key]
        sizes = [rows, *piece.sizes[1:]] if piece.sizes else []
        result = torch.empty(sizes, dtype=tensor.torch_dtype)
        if not result.numel():
            return result
        row_bytes = tensor.bytes_of(piece) // (piece.sizes[0] if piece.sizes else 1)
        data = result.view(-1).view(torch.uint8).numpy()
        file = self._open(piece.file)
        file.seek(piece.begin + first_row * row_bytes)
        read = file.readinto(data)  # type: ignore[attr-defined]
        if read != data.nbytes:
            raise CheckpointError(f"{self._folder}: {piece.file} ended {data.nbytes - read} bytes too early")
        return result

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, name: str) -> BinaryIO:
        if name not in self._files:
            self._files[name] = (self._folder / name).open("rb")
        return self._files[name]


@contextmanager
def open_checkpoint(folder: Path, manifest: Manifest) -> Iterator[CheckpointReader]:
    """Opens a checkpoint. Raises a `CheckpointError` if what it says about its contents cannot be believed."""
    reader: CheckpointReader
    reader = DcpCheckpoint(folder) if METADATA in manifest.files else RawCheckpoint(folder, manifest)
    try:
        yield reader
    except OSError as error:
        raise CheckpointError(f"{folder}: it cannot be read: {error.strerror or error}") from error
    finally:
        reader.close()


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint after checking every file and the index. Raises a `CheckpointError` that
    names the damage."""
    manifest = read_manifest(folder)
    verify_files(folder, manifest)
    with open_checkpoint(folder, manifest):
        return manifest


def fill(reader: CheckpointReader, key: str, chunks: Mapping[Box, Tensor]) -> None:
    """Copies the regions of a saved tensor into this rank's memory of them."""
    saved = reader.tensors[key]
    for box, memory in chunks.items():
        filled = 0
        for piece in saved.pieces:
            shared = overlap(box, piece.box)
            if shared is None:
                continue
            begin, sizes = shared
            first = begin[0] - piece.offsets[0] if begin else 0
            data = reader.read_piece(key, piece, first, sizes[0] if sizes else 1)
            origin = (begin[0], *piece.offsets[1:]) if begin else ()
            narrow(memory, box[0], (begin, sizes)).copy_(narrow(data, origin, (begin, sizes)))
            filled += math.prod(sizes)
        if filled != memory.numel():
            raise CheckpointError(f"the checkpoint holds {filled} of {memory.numel()} elements of {key}")

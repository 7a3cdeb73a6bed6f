"""Reads the tensors and objects of a checkpoint that save.py wrote, without executing anything that is in it."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from meshwright.checkpoint.chunks import Box, narrow, overlap
from meshwright.checkpoint.contents import check_contents
from meshwright.checkpoint.files import CheckpointFiles
from meshwright.checkpoint.index import INDEX, Piece, check_places, parse_index
from meshwright.checkpoint.manifest import Manifest, read_manifest, step_of
from meshwright.errors import CheckpointError
from meshwright.messages.plain_values import DamagedValueError, from_json


class CheckpointReader:
    """An opened checkpoint. `tensors` are those it holds, and `objects` the values that are not tensors, by key."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        index = parse_index(files.read(INDEX), files.folder)
        check_places(index, files.bytes_of, files.folder)
        self.tensors = index.tensors
        try:
            self.objects = {key: from_json(value) for key, value in index.objects.items()}
        except (DamagedValueError, RecursionError) as error:
            raise CheckpointError(f"{files.folder}: its {INDEX} is damaged: {error}") from None

    def read_piece(self, key: str, piece: Piece, first_row: int, rows: int) -> Tensor:
        """Returns `rows` rows of a piece of the tensor `key` from the piece's row `first_row` on. A piece without
        dimensions has one row."""
        tensor = self.tensors[key]
        sizes = [rows, *piece.sizes[1:]] if piece.sizes else []
        result = torch.empty(sizes, dtype=tensor.torch_dtype)
        if not result.numel():
            return result
        row_bytes = tensor.bytes_of(piece) // (piece.sizes[0] if piece.sizes else 1)
        data = result.view(-1).view(torch.uint8).numpy().data
        file = self.files.open(piece.file)
        file.seek(piece.begin + first_row * row_bytes)
        read = file.readinto(data)
        if read != data.nbytes:
            raise CheckpointError(f"{self.files.folder}: {piece.file} ended {data.nbytes - read} bytes too early")
        return result


@dataclass(frozen=True)
class Transfer:
    """A region that a piece of a saved tensor shares with this rank's `memory` of the region `box` of that tensor."""

    key: str
    piece: Piece
    memory: Tensor
    box: Box
    shared: Box


@contextmanager
def open_checkpoint(folder: Path, manifest: Manifest) -> Iterator[CheckpointReader]:
    """Opens the checkpoint that has this manifest. Raises a `CheckpointError` if what it says about its contents cannot
    be believed. Files are compared with the manifest when they are opened."""
    with CheckpointFiles(folder, manifest) as files:
        reader = CheckpointReader(files)
        problem = check_contents(reader.tensors, reader.objects)
        if problem is not None:
            raise CheckpointError(f"{folder}: it is damaged: {problem}")
        try:
            yield reader
        except OSError as error:
            raise CheckpointError(f"{folder}: it cannot be read: {error.strerror or error}") from error


def verify(folder: Path) -> Manifest:
    """Returns the manifest of a checkpoint after checking every file and all that must hold whatever the model is.
    Raises a `CheckpointError` that names the damage."""
    manifest = read_manifest(folder)
    with open_checkpoint(folder, manifest) as reader:
        reader.files.verify()
    return manifest


class VerifiedCheckpoints:
    """Remembers which checkpoints are good. A checkpoint is read again only if one of its files has another size, time
    of change or inode than when it was found to be good, or written."""

    def __init__(self) -> None:
        self._known: dict[Path, list[tuple[str, int, int, int]]] = {}

    def note(self, folder: Path) -> None:
        """Notes that a checkpoint was just written, with the checksums of what was to be written."""
        self._known[folder] = _file_states(folder)

    def is_good(self, folder: Path) -> bool:
        states = _file_states(folder)
        if self._known.get(folder) == states:
            return True
        try:
            is_good = verify(folder).step == step_of(folder.name)
        except CheckpointError:
            is_good = False
        if is_good:
            self._known[folder] = states
        return is_good


def _file_states(folder: Path) -> list[tuple[str, int, int, int]]:
    """Name, size, time of change and inode of each file."""
    states = [(path.name, path.lstat()) for path in sorted(folder.iterdir())]
    return [(name, state.st_size, state.st_mtime_ns, state.st_ino) for name, state in states]


def plan_transfers(reader: CheckpointReader, key: str, chunks: Mapping[Box, Tensor]) -> list[Transfer]:
    """Returns what has to be copied from a saved tensor into this rank's memory of its regions."""
    saved = reader.tensors[key]
    transfers = []
    for box, memory in chunks.items():
        regions = [(piece, overlap(box, piece.box)) for piece in saved.pieces]
        of_box = [Transfer(key, piece, memory, box, shared) for piece, shared in regions if shared is not None]
        filled = sum(math.prod(transfer.shared[1]) for transfer in of_box)
        if filled != memory.numel():
            raise CheckpointError(f"the checkpoint holds {filled} of {memory.numel()} elements of {key}")
        transfers += of_box
    return transfers


def transfer(reader: CheckpointReader, part: Transfer) -> None:
    """Copies a region of a saved tensor into this rank's memory."""
    begin, sizes = part.shared
    first = begin[0] - part.piece.offsets[0] if begin else 0
    data = reader.read_piece(part.key, part.piece, first, sizes[0] if sizes else 1)
    origin = (begin[0], *part.piece.offsets[1:]) if begin else ()
    narrow(part.memory, part.box[0], part.shared).copy_(narrow(data, origin, part.shared))

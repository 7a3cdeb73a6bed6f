"""Reads checkpoints that Meshwright wrote with torch.distributed.checkpoint (DCP), before it had a format of its own.

DCP's index is a pickle, and so are the objects in its files. They are read by unpicklers that know a short list of
harmless classes and refuse every other one, so that nothing in such a checkpoint is executed.
"""

import pickle
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata

from meshwright.checkpoint.index import Piece, SavedTensor
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError

METADATA = ".metadata"

_HARMLESS = {
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
    "torch": {"Size", *(name for name, value in vars(torch).items() if isinstance(value, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


class DcpCheckpoint:
    """A checkpoint in DCP's format, as the `CheckpointReader` of reader.py."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            metadata = _MetadataUnpickler(BytesIO((folder / METADATA).read_bytes())).load()
            self._places = {(index.fqn, _numbers(index.offset)): info for index, info in metadata.storage_data.items()}
            self.tensors = {key: self._saved_tensor(key, entry) for key, entry in _entries(metadata, is_tensor=True)}
            self.objects = {key: self._read(key, None) for key, _ in _entries(metadata, is_tensor=False)}
        except Exception as error:  # damaged or crafted files raise any exception
            raise CheckpointError(f"{folder}: it is damaged: {_first_line(error)}") from None

    def read_piece(self, key: str, piece: Piece, first_row: int, rows: int) -> Tensor:
        try:
            data = self._read(key, tuple(piece.offsets))
            if not isinstance(data, Tensor) or list(data.shape) != piece.sizes:
                raise TypeError(f"a part of {key} has another shape than {METADATA} says")
        except Exception as error:
            raise CheckpointError(f"{self._folder}: it is damaged: {_first_line(error)}") from None
        return data[first_row : first_row + rows] if data.dim() else data

    def close(self) -> None:
        """Does nothing, because no file stays open."""

    def _saved_tensor(self, key: str, entry: TensorStorageMetadata) -> SavedTensor:
        pieces = []
        for chunk in entry.chunks:
            place = self._place(key, tuple(chunk.offsets))
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            pieces.append(Piece(offsets=offsets, sizes=sizes, file=place.relative_path, begin=place.offset))
        return SavedTensor(dtype=torch_name(entry.properties.dtype), shape=list(entry.size), pieces=pieces)

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        """Returns where DCP wrote an object or a part of a tensor. Whole tensors may be listed without offsets."""
        place = self._places.get((key, offsets))
        return self._places[key, None] if place is None else place

    def _read(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        place = self._place(key, offsets)
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{key} is in a file outside of the folder")
        with (self._folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            data = BytesIO(file.read(place.length))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.load warns of files that it then refuses
            return torch.load(data, map_location="cpu", weights_only=True)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name not in _HARMLESS.get(module, ()):
            raise pickle.UnpicklingError(f"its {METADATA} names {module}.{name}, which is not read from files")
        return super().find_class(module, name)


def _entries(metadata: Metadata, *, is_tensor: bool) -> list[tuple[str, Any]]:
    kind = TensorStorageMetadata if is_tensor else BytesStorageMetadata
    return [(key, entry) for key, entry in metadata.state_dict_metadata.items() if isinstance(entry, kind)]


def _first_line(error: Exception) -> str:
    """The first line of an exception's message. torch.load's messages go on with advice that does not fit here."""
    return str(error).partition("\n")[0][:200]


def _numbers(offsets: Any) -> tuple[int, ...] | None:
    return None if offsets is None else tuple(int(offset) for offset in offsets)

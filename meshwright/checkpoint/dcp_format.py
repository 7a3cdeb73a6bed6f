"""Reads checkpoints that Meshwright wrote with torch.distributed.checkpoint (DCP), before it had a format of its own.

DCP's index is a pickle, and so are the objects in its files. The index is read with stand-ins for the few classes that
it names, and the files with files/pt_file.py, so that nothing in such a checkpoint is executed.
"""

from collections.abc import Mapping
from functools import partial
from io import BytesIO
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.files import CheckpointFiles
from meshwright.checkpoint.index import Piece, SavedTensor
from meshwright.dtypes import torch_name
from meshwright.errors import CheckpointError
from meshwright.files.pt_file import read_pt_bytes
from meshwright.files.safe_pickle import SafeUnpickler, StandIn

METADATA = ".metadata"

_PATHS = ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
_CLASSES = {
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    ),
}


class DcpCheckpoint:
    """A checkpoint in DCP's format, as the `CheckpointReader` of reader.py."""

    def __init__(self, files: CheckpointFiles) -> None:
        self.files = files
        try:
            fields = _MetadataUnpickler(BytesIO(files.read(METADATA))).load().fields
            self._places = {_place_key(index): info.fields for index, info in fields["storage_data"].items()}
            entries = fields["state_dict_metadata"]
            self.tensors = {
                key: self._saved_tensor(key, entry.fields)
                for key, entry in entries.items()
                if entry.kind == "TensorStorageMetadata"
            }
            self.objects = {key: self._read(key, None) for key in entries if key not in self.tensors}
        except CheckpointError:
            raise
        except Exception as error:  # damaged or crafted files raise any exception
            raise CheckpointError(f"{files.folder}: it is damaged: {_first_line(error)}") from None

    def read_piece(self, key: str, piece: Piece, first_row: int, rows: int) -> Tensor:
        try:
            data = self._read(key, tuple(piece.offsets))
            if not (isinstance(data, Tensor) and data.is_cpu and data.layout == torch.strided):
                raise TypeError(f"a part of {key} is not a dense tensor")
            if list(data.shape) != piece.sizes or data.dtype != self.tensors[key].torch_dtype:
                raise TypeError(f"a part of {key} has another shape or dtype than {METADATA} says")
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(f"{self.files.folder}: it is damaged: {_first_line(error)}") from None
        return data[first_row : first_row + rows] if data.dim() else data

    def verify_tensors(self) -> None:
        """Raises a `CheckpointError` if a part of a tensor cannot be read, or is not what the index says."""
        for key, tensor in self.tensors.items():
            for piece in tensor.pieces:
                self.read_piece(key, piece, 0, 0)

    def _saved_tensor(self, key: str, fields: Mapping[str, Any]) -> SavedTensor:
        pieces = []
        for chunk in fields["chunks"]:
            offsets, sizes = list(chunk.fields["offsets"]), list(chunk.fields["sizes"])
            place = self._place(key, tuple(offsets))
            pieces.append(Piece(offsets=offsets, sizes=sizes, file=place["relative_path"], begin=place["offset"]))
        properties = fields["properties"].fields
        dtype = properties["state"][0] if "state" in properties else properties["dtype"]
        return SavedTensor(dtype=torch_name(dtype), shape=list(fields["size"]), pieces=pieces)

    def _place(self, key: str, offsets: tuple[int, ...] | None) -> Mapping[str, Any]:
        """Returns where DCP wrote an object or a part of a tensor. Whole tensors may be listed without offsets."""
        place = self._places.get((key, offsets))
        return self._places[key, None] if place is None else place

    def _read(self, key: str, offsets: tuple[int, ...] | None) -> Any:
        place = self._place(key, offsets)
        file = self.files.open(place["relative_path"])
        file.seek(place["offset"])
        return read_pt_bytes(bytearray(file.read(place["length"])))


class _MetadataUnpickler(SafeUnpickler):
    """Reads DCP's index. Objects of its classes become `StandIn` objects; nothing is imported."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _CLASSES.get(module, ()):
            return partial(StandIn, name)
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if (module, name) == ("torch", "Size"):
            return _size
        if (module, name) == ("torch.serialization", "_get_layout") or name == "_MEM_FORMAT_ENCODING":
            return _ignore
        if module.startswith("pathlib") and name in _PATHS:
            return _path
        return super().find_class(module, name)


def _size(sizes: Any) -> tuple[int, ...]:
    """Stands for `torch.Size`. Other values than numbers are refused: they could be tuples of tuples of tuples."""
    if not all(type(size) is int for size in sizes):
        raise ValueError("a size is not a number")
    return tuple(sizes)


def _path(*parts: Any) -> str:
    """Stands for the classes of paths. What is longer than a path can be is cut, because it could be repeated."""
    return "/".join(parts)[:4096]


def _ignore(*_: Any) -> None:
    """Stands for functions whose results are not needed."""


def _place_key(index: StandIn) -> tuple[str, tuple[int, ...] | None]:
    offsets = index.fields.get("offset")  # DCP leaves out what is None
    return index.fields["fqn"], None if offsets is None else tuple(offsets)


def _first_line(error: Exception) -> str:
    """The first line of an exception's message."""
    return str(error).partition("\n")[0][:200]

"""Reads a file of a recorded step, which `torch.save` wrote, so that whatever is in it, nothing of it is executed: no
more memory is used than the file is large, and a file that is damaged raises an `InputError` that names it.

Such a file is a zip archive. One entry, data.pkl, is a pickle that may only name the few functions and types in
`_GLOBALS`, which are replaced by our own; the others are the bytes of tensors. The archive has a checksum of each."""

import io
import math
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from meshwright.errors import InputError
from meshwright.files.safe_pickle import SafeUnpickler
from meshwright.train.output.observation import RankObservation

Tensors = dict[str, Tensor]

_STORAGE_DTYPES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "ComplexFloatStorage": torch.complex64,
    "ComplexDoubleStorage": torch.complex128,
}
_LARGEST_PICKLE_BYTES = 2**30
_MOST_EXPANDED_BYTES = 2**30  # of tensors that repeat elements of their storage
_OBSERVATION = TypeAdapter(RankObservation)
_KEYS = {"gradients", "state", "seen", "gradients_of", "state_of"}


@dataclass(frozen=True)
class RecordedStep:
    """One step of a run: the full gradients and state (weights and buffers) of rank 0, on the CPU, and the observations
    of all ranks. `norm` is None without clipping. `differing_gradients` and `differing_states` hold, by rank and then
    by name, the tensors of other ranks that are not bitwise equal to those of rank 0."""

    loss: Tensor
    norm: Tensor | None
    gradients: Tensors
    state: Tensors
    observations: tuple[RankObservation, ...]
    differing_gradients: Mapping[int, Tensors]
    differing_states: Mapping[int, Tensors]


class _DamagedRecord(Exception):
    """The content of a file is not what `StepRecorder` writes."""


def read_record(file: Path) -> RecordedStep:
    """Returns the recorded step in a file. Raises an `InputError` of one line if the file is missing or damaged."""
    try:
        return _recorded_step(_load(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read as a recorded step: {error.strerror or error}") from None
    except Exception as error:  # a damaged pickle or archive can raise any of them
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise InputError(f"{file} is damaged, it cannot be read as a recorded step: {reason}") from None


# ---- the archive


def _load(file: Path) -> Any:
    """Returns the object in a file that `torch.save` wrote."""
    with zipfile.ZipFile(file) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
            raise _DamagedRecord("its entries are compressed")
        if "data.pkl" not in entries or entries["data.pkl"].file_size > _LARGEST_PICKLE_BYTES:
            raise _DamagedRecord("it has no data.pkl of a possible size")
        if "byteorder" in entries and archive.read(entries["byteorder"]).decode() != sys.byteorder:
            raise _DamagedRecord("it was written on a machine with another byte order")
        return _RecordUnpickler(archive, entries).load()


class _RecordUnpickler(SafeUnpickler):
    """Reads data.pkl. It imports nothing: a name in the pickle stands for a function or type of this file."""

    def __init__(self, archive: zipfile.ZipFile, entries: Mapping[str, zipfile.ZipInfo]) -> None:
        super().__init__(io.BytesIO(archive.read(entries["data.pkl"])))
        self._archive, self._entries = archive, entries
        self._storages: dict[str, bytearray] = {}
        self._expanded_bytes = 0

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        if module == "torch._utils" and name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3"):
            return self._tensor
        if module == "torch" and name in _STORAGE_DTYPES:
            return _STORAGE_DTYPES[name]
        if module == "torch.storage" and name == "UntypedStorage":
            return torch.uint8
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise _DamagedRecord(f"it names {module}.{name}")

    def persistent_load(self, identifier: Any) -> tuple[bytearray, torch.dtype]:
        """Returns the bytes of a tensor's storage, and its dtype."""
        kind, dtype, key, _, count = identifier
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise _DamagedRecord(f"it refers to {kind!r}")
        if key not in self._storages:
            self._storages[key] = bytearray(self._archive.read(self._entries[f"data/{key}"]))
        if len(self._storages[key]) != count * dtype.itemsize:
            raise _DamagedRecord(f"its storage {key} has {len(self._storages[key])} bytes")
        return self._storages[key], dtype

    def _tensor(
        self, storage: Any, offset: int, size: Any, stride: Any, _requires_grad: bool, _hooks: Any, *more: Any
    ) -> Tensor:
        content, dtype = storage
        dtype = more[0] if more and isinstance(more[0], torch.dtype) else dtype
        needed = math.prod(size) * dtype.itemsize
        if needed > len(content):  # a dimension of stride 0, for instance
            self._expanded_bytes += needed
            if self._expanded_bytes > _MOST_EXPANDED_BYTES:
                raise _DamagedRecord(f"its tensors of shape {tuple(size)} and others are larger than the file")
        flat = torch.frombuffer(content, dtype=dtype) if content else torch.empty(0, dtype=dtype)
        return flat.as_strided(size, stride, offset)


# ---- the content


def _recorded_step(content: Any) -> RecordedStep:
    """Returns the content of a file as a recorded step. Raises `_DamagedRecord` if anything in it is of another kind or
    shape than `StepRecorder` writes."""
    if not isinstance(content, dict) or not content.keys() >= _KEYS or not content.keys() <= _KEYS | {"loss", "norm"}:
        raise _DamagedRecord("it has other fields than a recorded step")
    loss, norm = content.get("loss", torch.zeros(())), content.get("norm")
    for name, value in (("loss", loss), ("norm", norm)):
        if not (isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()) and (
            value is not None or name == "loss"
        ):
            raise _DamagedRecord(f"its {name} is not a number")
    state = _tensors(content["state"], "state")
    gradients = _tensors(content["gradients"], "gradients", state)
    observations = tuple(_observations(content["seen"]))
    return RecordedStep(
        loss=loss.reshape(()),
        norm=norm,
        gradients=gradients,
        state=state,
        observations=observations,
        differing_gradients=_tensors_of_ranks(content["gradients_of"], "gradients", len(observations), state),
        differing_states=_tensors_of_ranks(content["state_of"], "state", len(observations), state),
    )


def _tensors(value: Any, what: str, state: Mapping[str, Tensor] | None = None) -> Tensors:
    """Returns the value if it maps names to tensors. With `state`, tensors must have the shape of the weight or buffer
    of their name."""
    if not isinstance(value, dict):
        raise _DamagedRecord(f"its {what} are no mapping")
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise _DamagedRecord(f"its {what} hold something that is no tensor")
        if state is not None and (name not in state or state[name].shape != tensor.shape):
            raise _DamagedRecord(f"its {what} of {name} have the shape {tuple(tensor.shape)}, unlike the weight")
    return value


def _tensors_of_ranks(value: Any, what: str, ranks: int, state: Mapping[str, Tensor]) -> dict[int, Tensors]:
    if not isinstance(value, dict) or not all(type(rank) is int and 0 < rank < ranks for rank in value):
        raise _DamagedRecord(f"its {what} of other ranks are no mapping of ranks below {ranks}")
    return {rank: _tensors(tensors, what, state) for rank, tensors in value.items()}


def _observations(value: Any) -> Iterator[RankObservation]:
    """Yields the observations of ranks 0, 1, and so on."""
    if not isinstance(value, list | tuple) or not value:
        raise _DamagedRecord("it has no observations of ranks")
    names = {field.name for field in fields(RankObservation)}
    for rank, stored in enumerate(value):
        if not isinstance(stored, dict):
            raise _DamagedRecord(f"its observations of rank {rank} are no mapping")
        observed = RankObservation.with_field_names(stored)
        try:
            observation = _OBSERVATION.validate_python(observed)
        except ValidationError as error:
            problem = error.errors()[0]
            where = ".".join(map(str, problem["loc"]))
            raise _DamagedRecord(f"its observations of rank {rank}: {where}: {problem['msg']}") from None
        if observation.rank != rank or not observed.keys() <= names:
            raise _DamagedRecord(f"its observations of rank {rank} have other fields or another rank")
        yield observation

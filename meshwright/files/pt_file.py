"""Reads a file that `torch.save` wrote, such as a state dict, so that whatever is in it, nothing of it is executed. It
cannot crash the process, and it needs little more memory than the file is large.

Such a file is a zip archive. One entry, data.pkl, is a pickle, and every other one is the storage of tensors. The
pickle is read in two steps: an unpickler that knows a few names only makes a description of each tensor, and then
`_Values` replaces the descriptions by tensors, whose storages are mapped from the file. Storages are not compressed and
do not overlap, and the archive has a checksum of each.
"""

import math
import mmap
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright.files.regular_file import open_regular_file
from meshwright.files.safe_pickle import SafeUnpickler
from meshwright.files.stored_zip import PtFileError, StoredZip

if TYPE_CHECKING:
    from torch import Tensor

_STORAGE_DTYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
# Far beyond what state dicts need: one tensor takes about 200 bytes of the pickle. Objects are larger in
# memory than in a pickle, so without these limits a crafted file could fill the memory.
_LARGEST_PICKLE_BYTES = 16 * 2**20
_MOST_TENSORS = 10**5
_MOST_VALUES = 10**7  # values that stand in several places count in each
_MOST_EXPANDED_BYTES = 2**30  # of tensors that repeat elements of their storage
_MOST_DIMENSIONS = 64
_ALIGNMENT = 16  # bytes of the largest number, a complex128
_BUILD = ord("b")  # the pickle instruction that sets the attributes of an object


def read_pt_file(file: Path) -> Any:
    """Returns the value in a file that `torch.save` wrote: tensors on the CPU, numbers, texts and containers of them.
    Raises a `PtFileError` if the file is damaged or holds anything else, and an `OSError` if it cannot be read."""
    with open_regular_file(file) as stream:
        if not stream.seek(0, 2):
            raise PtFileError("it is empty")
        # A private copy: who changes a tensor changes neither the file nor other readers.
        return read_pt_bytes(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY))


def read_pt_bytes(data: mmap.mmap | bytearray) -> Any:
    """Returns the value in the bytes of a file, as `read_pt_file` does. The tensors share the memory of `data`."""
    if data[:1] == b"\x80":  # as every pickle begins
        raise PtFileError(
            "it has the format of torch.save before torch 1.6, or is another pickle: convert it with"
            " torch.save(torch.load(OLD, weights_only=True), NEW)"
        )
    if data[:4] != b"PK\3\4":
        raise PtFileError("torch.save did not write it")
    try:
        archive = StoredZip(data)
        if archive.entry_size("data.pkl") > _LARGEST_PICKLE_BYTES:
            raise PtFileError(f"its data.pkl has more than {_LARGEST_PICKLE_BYTES:,} bytes")
        if archive.entry_size("byteorder") and archive.read("byteorder") != sys.byteorder.encode():
            raise PtFileError("it was written on a machine with another byte order")
        return _Values(archive).convert(_TensorUnpickler(archive.read("data.pkl")).load())
    except PtFileError:
        raise
    except RecursionError:
        raise PtFileError("it is damaged: its values are nested too deeply") from None
    except Exception as error:  # a damaged pickle raises any exception
        reason = str(error)[:200].partition("\n")[0] or type(error).__name__
        raise PtFileError(f"it is damaged: {reason}") from None


# ---- the pickle


@dataclass(frozen=True, eq=False)
class _Storage:
    """The storage `key` of tensors, with `count` elements of the dtype."""

    key: str
    dtype: Any
    count: int


@dataclass(frozen=True, eq=False)
class _TensorInStorage:
    """A tensor whose elements are in a storage. The numbers count elements of `dtype`."""

    storage: _Storage
    dtype: Any
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class _TensorUnpickler(SafeUnpickler):
    """Reads data.pkl. It imports nothing: a name in the pickle stands for a method of this class. Tensors are not made
    here, because some instructions of pickles call methods of the objects that they work on."""

    def __init__(self, pickle: bytes) -> None:
        super().__init__(BytesIO(pickle))
        self._copied = 0
        self._functions: dict[tuple[str, str], Callable[..., Any]] = {
            ("collections", "OrderedDict"): self._ordered_dict,
            ("collections", "Counter"): self._counter,
            ("builtins", "set"): self._set,
            ("__builtin__", "set"): self._set,
            ("_codecs", "encode"): self._encode,
            ("torch", "Size"): self._size,
            ("torch", "device"): self._device,
            ("torch", "Tensor"): self._parameter,
            ("torch.nn.parameter", "Parameter"): self._parameter,
            ("torch._utils", "_rebuild_tensor_v2"): self._tensor,
            ("torch._utils", "_rebuild_tensor_v3"): self._tensor,
            ("torch._utils", "_rebuild_parameter"): self._parameter,
            ("torch._utils", "_rebuild_parameter_with_state"): self._parameter,
            ("torch._tensor", "_rebuild_from_type_v2"): self._tensor_with_attributes,
        }

    def find_class(self, module: str, name: str) -> Any:
        import torch

        if (module, name) in self._functions:
            return self._functions[module, name]
        if (module, name) == ("torch.storage", "UntypedStorage"):
            return torch.uint8
        if module == "torch" and name in _STORAGE_DTYPES:
            return getattr(torch, _STORAGE_DTYPES[name])
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if module == "torch._utils" and name.startswith("_rebuild_"):
            kind = name.removeprefix("_rebuild_").removesuffix("_no_storage").replace("_", " ")
            raise PtFileError(f"it holds a {kind:.50}: only dense tensors with data are read from files")
        named = f"{module}.{name}"
        raise PtFileError(f"it names {named:.100}, which is not read from files: save tensors and plain values only")

    def persistent_load(self, identifier: Any) -> _Storage:
        """Returns the storage that an instruction of the pickle refers to."""
        import torch

        kind, dtype, key, _, count = identifier
        if kind != "storage" or not isinstance(dtype, torch.dtype) or type(key) is not str or not _are_sizes([count]):
            raise PtFileError("it is damaged: it refers to something that is no storage")
        return _Storage(key, dtype, count)

    def _tensor(
        self,
        storage: Any,
        offset: Any,
        size: Any,
        stride: Any,
        _requires_grad: Any,
        _hooks: Any,
        dtype: Any = None,
        metadata: Any = None,
    ) -> _TensorInStorage:
        """Stands for torch's `_rebuild_tensor_v3`, and for `_rebuild_tensor_v2`, which has no `dtype`."""
        import torch

        if not isinstance(storage, _Storage):
            raise PtFileError("it is damaged: a tensor has no storage")
        if not isinstance(dtype, torch.dtype):
            dtype, metadata = storage.dtype, dtype
        if metadata:
            raise PtFileError("it holds a conjugated or negated view of a tensor: save a copy of it (`resolve_conj`)")
        if len(size) != len(stride) or len(size) > _MOST_DIMENSIONS or not _are_sizes([offset, *size, *stride]):
            raise PtFileError("it is damaged: the size of a tensor is impossible")
        return _TensorInStorage(storage, dtype, offset, tuple(size), tuple(stride))

    def _parameter(self, tensor: Any, _requires_grad: Any, _hooks: Any, _attributes: Any = None) -> Any:
        """Stands for the functions that make a parameter of a tensor. A parameter is read as its tensor."""
        return tensor

    def _tensor_with_attributes(self, _function: Any, _kind: Any, arguments: Any, _attributes: Any) -> Any:
        """Stands for the function that makes a tensor to which a user has given attributes. They are left out."""
        return self._tensor(*arguments) if len(arguments) > 4 else self._parameter(*arguments)

    def _size(self, sizes: Any) -> tuple[int, ...]:
        """Stands for `torch.Size`."""
        if len(sizes) > _MOST_DIMENSIONS or not _are_sizes(sizes):
            raise PtFileError("it is damaged: a torch.Size is impossible")
        return tuple(sizes)

    def _device(self, kind: Any, index: Any = None) -> str:
        """Stands for `torch.device`. A device is read as its name, because this machine may not have it."""
        if not isinstance(kind, str) or not (index is None or _are_sizes([index])):
            raise PtFileError("it is damaged: a torch.device is impossible")
        return kind if index is None else f"{kind:.50}:{index}"

    def _encode(self, text: Any, _encoding: Any) -> bytes:
        """Stands for `_codecs.encode`, which makes the bytes in pickles of protocol 2."""
        return self._count(text, str).encode("latin1")

    def _ordered_dict(self) -> OrderedDict[Any, Any]:
        return OrderedDict()

    def _counter(self, counts: Any) -> Counter[Any]:
        return Counter(self._count(counts, dict))

    def _set(self, items: Any) -> set[Any]:
        return set(self._count(items, list))

    def _count(self, value: Any, kind: Any) -> Any:
        """Returns a value that is about to be copied. Raises a `PtFileError` if it is not of this kind, or if more was
        copied than the pickle has bytes: one that is written once can be copied again and again."""
        if type(value) is not kind:
            raise PtFileError("it is damaged: a value is not of the kind that it says")
        self._copied += len(value)
        if self._copied > _LARGEST_PICKLE_BYTES:
            raise PtFileError("it is damaged: it repeats too many values")
        return value

    def _load_build(self) -> None:
        """Leaves out the attributes of an OrderedDict: state dicts have versions of their modules there."""
        if type(self.stack[-2]) is OrderedDict:
            self.stack.pop()
        else:
            SafeUnpickler.dispatch[_BUILD](self)

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = {**SafeUnpickler.dispatch, _BUILD: _load_build}


def _are_sizes(values: Any) -> bool:
    return all(type(value) is int and 0 <= value < 2**63 for value in values)


# ---- the values


class _Values:
    """Turns what `_TensorUnpickler` returns into values of Python and torch only."""

    def __init__(self, archive: StoredZip) -> None:
        self._archive = archive
        self._converted: dict[int, tuple[Any, int]] = {}  # by the id of a value: the result, and how many values it has
        self._storages: dict[str, Tensor] = {}
        self._tensors = 0
        self._expanded_bytes = 0

    def convert(self, value: Any) -> Any:
        """Returns the value with tensors in place of their descriptions. Raises a `PtFileError` if it has other objects
        in it, contains itself, or has too many values."""
        return self._convert(value)[0]

    def _convert(self, value: Any) -> tuple[Any, int]:
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return value, 1
        if id(value) in self._converted:
            result, size = self._converted[id(value)]
            if not size:
                raise PtFileError("it is damaged: a value contains itself")
            return result, size
        self._converted[id(value)] = None, 0
        result, size = self._convert_object(value)
        if size > _MOST_VALUES:
            raise PtFileError(f"it has more than {_MOST_VALUES:,} values")
        self._converted[id(value)] = result, size
        return result, size

    def _convert_object(self, value: Any) -> tuple[Any, int]:
        import torch

        if isinstance(value, _TensorInStorage):
            return self._tensor(value), 1
        if isinstance(value, torch.dtype):
            return value, 1
        if isinstance(value, dict):
            keys, values = [self._convert(key) for key in value], [self._convert(inner) for inner in value.values()]
            pairs = zip((key for key, _ in keys), (inner for inner, _ in values), strict=True)
            return type(value)(dict(pairs)), 1 + sum(size for _, size in (*keys, *values))
        container: Any = next((kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind)), None)
        if container is None:
            raise PtFileError("it is damaged: it holds something else than tensors and plain values")
        items = [self._convert(item) for item in value]
        return container(item for item, _ in items), 1 + sum(size for _, size in items)

    def _tensor(self, tensor: _TensorInStorage) -> "Tensor":
        self._tensors += 1
        if self._tensors > _MOST_TENSORS:
            raise PtFileError(f"it has more than {_MOST_TENSORS:,} tensors")
        content = self._content(tensor.storage)
        needed = math.prod(tensor.size) * tensor.dtype.itemsize
        if needed > content.nbytes:  # a dimension of stride 0, for instance
            self._expanded_bytes += needed
            if self._expanded_bytes > _MOST_EXPANDED_BYTES:
                raise PtFileError(f"its tensors of shape {tensor.size} and others are larger than the file")
        return content.view(tensor.dtype).as_strided(tensor.size, tensor.stride, tensor.offset)

    def _content(self, storage: _Storage) -> "Tensor":
        """Returns the bytes of a storage."""
        import torch

        if storage.key not in self._storages:
            entry = self._archive.entry(f"data/{storage.key}")
            size = entry.end - entry.begin
            content = torch.empty(0, dtype=torch.uint8)
            if size:
                content = torch.frombuffer(self._archive.data, dtype=torch.uint8, count=size, offset=entry.begin)
            # torch.save aligns entries as numbers of all dtypes need it, other programs may not: a copy is aligned.
            self._storages[storage.key] = content.clone() if entry.begin % _ALIGNMENT else content
        content = self._storages[storage.key]
        if content.nbytes != storage.count * storage.dtype.itemsize:
            raise PtFileError(f"it is damaged: its storage {storage.key:.100} has {content.nbytes} bytes")
        return content

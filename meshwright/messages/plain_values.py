"""Writes and reads plain values as JSON: numbers, texts, containers of them, and small tensors.

Checkpoints and messages between ranks use this instead of pickle, because reading a pickle can execute code. Values
that JSON has no word for are objects with one key, which names their type:

    (1, 2)                  {"tuple": [1, 2]}
    {"lr": 0.1}             {"dict": {"lr": 0.1}}
    {0: "a"}                {"pairs": [[0, "a"]]}
    float("inf")            {"float": "inf"}
    torch.tensor([1, 2])    {"tensor": {"dtype": "int64", "shape": [2], "bytes": "<base64>"}}

Tensors and parameters are read as tensors on the CPU that need no gradient. All other values are read as they were.
"""

import base64
import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from meshwright.dtypes import torch_name

# Byte order, kind (boolean, integer, floating-point or complex number) and size of NumPy's dtypes. Arrays of any other
# kind are refused: those of objects would be pickles.
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
_TORCH_DTYPES = {torch_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_LARGEST_SIZE = 2**63  # torch's sizes are signed integers of 64 bits
_FACTORIES: dict[str, Callable[[], Any]] = {"int": int, "float": float, "list": list, "dict": dict, "set": set}


class NotPlainError(TypeError):
    """A value cannot be written because it is not plain. The message begins with its place, such as `['a'][2]`."""


class DamagedValueError(ValueError):
    """A text is not what `to_text` writes."""


def to_text(value: Any, place: str = "") -> str:
    """Returns the value as JSON. Raises NotPlainError if it contains anything else than plain values. `place` begins
    its message."""
    try:
        return json.dumps(to_json(value, place), allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError) as error:  # an integer with too many digits, or too many levels
        raise NotPlainError(f"{place or 'it'} cannot be written: {error}") from None


def from_text(text: str | bytes) -> Any:
    """Returns the value that `to_text` wrote. Raises DamagedValueError if the text is anything else."""
    try:
        content = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise DamagedValueError(_first_line(error)) from None
    return from_json(content)


def to_json(value: Any, place: str = "") -> Any:
    """Returns the value as dicts, lists, numbers and texts, for `json.dumps`. `place` begins the message of a
    NotPlainError."""
    try:
        return _write(value, place)
    except RecursionError:
        raise NotPlainError(f"{place or 'it'} has too many levels, or contains itself") from None


def from_json(value: Any) -> Any:
    """Returns the value that `to_json` converted. Raises DamagedValueError if it is anything else."""
    try:
        return _read(value)
    except RecursionError:
        raise DamagedValueError("it has too many levels") from None


def tensor_bytes(tensor: Tensor) -> Tensor:
    """Returns the bytes of a dense tensor's elements, in the order of the elements, as a tensor on the CPU. It may
    share the memory of the given one."""
    cpu = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = cpu.as_strided((cpu.numel(),), (1,))  # `flatten` keeps the stride of a view of one element
    return flat.view(torch.uint8)


def _write(value: Any, place: str) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    write = _array if isinstance(value, np.generic) else _WRITERS.get(type(value))
    if write is None:
        raise NotPlainError(f"{place or 'it'} is a {type(value).__module__}.{type(value).__qualname__}")
    return write(value, place)


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1:
        raise DamagedValueError(f"an object has {len(value)} keys instead of one")
    ((name, content),) = value.items()
    if name not in _READERS:
        raise DamagedValueError(f"{name!r:.50} is not a type of value")
    try:
        return _READERS[name](content)
    except (DamagedValueError, RecursionError):
        raise
    except (TypeError, ValueError, AttributeError, LookupError, RuntimeError, OverflowError) as error:
        raise DamagedValueError(f"a value of type {name} cannot be read: {_first_line(error)}") from None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


# ---- containers


def _items(values: Iterable[Any], place: str) -> list[Any]:
    return [_write(item, f"{place}[{index}]") for index, item in enumerate(values)]


def _pairs(value: Any, place: str) -> list[Any]:
    return [[_write(key, f"a key of {place or 'it'}"), _write(v, f"{place}[{key!r}]")] for key, v in value.items()]


def _dict(value: dict[Any, Any], place: str) -> dict[str, Any]:
    if all(type(key) is str for key in value):
        return {"dict": {key: _write(v, f"{place}[{key!r}]") for key, v in value.items()}}
    return {"pairs": _pairs(value, place)}


def _default_dict(value: defaultdict[Any, Any], place: str) -> dict[str, Any]:
    name = next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)
    if name is None:
        raise NotPlainError(f"{place or 'it'} is a defaultdict of {value.default_factory}")
    return {"defaultdict": [name, _pairs(value, place)]}


def _read_pairs(content: Any) -> dict[Any, Any]:
    pairs = [_list(pair, 2) for pair in _list(content)]
    return {_read(key): _read(value) for key, value in pairs}


def _read_dict(content: Any) -> dict[str, Any]:
    return {key: _read(value) for key, value in content.items()}


def _read_default_dict(content: Any) -> defaultdict[Any, Any]:
    name, pairs = _list(content, 2)
    return defaultdict(_FACTORIES[name], _read_pairs(pairs))


def _read_deque(content: Any) -> deque[Any]:
    longest, items = _list(content, 2)
    return deque(_read_items(items), maxlen=longest)


def _read_items(content: Any) -> list[Any]:
    return [_read(item) for item in _list(content)]


def _list(content: Any, length: int | None = None) -> list[Any]:
    """The content, after checking that it is a list, and of this length unless it is None."""
    if not isinstance(content, list) or length not in (None, len(content)):
        raise TypeError(f"{content!r:.50} is not a list" + (f" of {length}" if length else ""))
    return content


# ---- tensors and arrays


def _tensor(value: Tensor, place: str) -> dict[str, Any]:
    if value.layout != torch.strided or value.is_quantized or value.is_nested or value.is_meta:
        raise NotPlainError(f"{place or 'it'} is a tensor that is not dense")
    return {"tensor": _array_fields(torch_name(value.dtype), value.shape, tensor_bytes(value).numpy().tobytes())}


def _read_tensor(content: Any) -> Tensor:
    dtype = _TORCH_DTYPES[content["dtype"]]
    data = _array_bytes(content, dtype.itemsize)
    flat = torch.frombuffer(data, dtype=torch.uint8).view(dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(content["shape"])


def _array(value: Any, place: str) -> dict[str, Any]:
    array = np.asarray(value)
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str):
        raise NotPlainError(f"{place or 'it'} is a NumPy array of {array.dtype}")
    name = "numpy_number" if isinstance(value, np.generic) else "array"
    return {name: _array_fields(array.dtype.str, array.shape, array.tobytes())}


def _read_array(content: Any) -> np.ndarray:
    if not _NUMPY_DTYPE.fullmatch(content["dtype"]):
        raise ValueError(f"{content['dtype']!r:.50} is not a dtype of numbers")
    dtype = np.dtype(content["dtype"])
    return np.frombuffer(_array_bytes(content, dtype.itemsize), dtype=dtype).reshape(content["shape"])


def _array_fields(dtype: str, shape: Iterable[int], data: bytes) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "bytes": base64.b64encode(data).decode()}


def _array_bytes(content: Any, item_bytes: int) -> bytearray:
    """The decoded bytes of an array or tensor, after checking that there are as many as its shape and dtype say."""
    data = bytearray(_read_bytes(content["bytes"]))
    if len(data) != math.prod(_read_size(content["shape"])) * item_bytes:
        raise ValueError(f"it has {len(data)} bytes")
    return data


def _read_size(content: Any) -> torch.Size:
    if any(type(size) is not int or not 0 <= size < _LARGEST_SIZE for size in _list(content)):
        raise ValueError(f"{content!r:.50} is not a shape")
    return torch.Size(content)


# ---- single values


def _read_bytes(content: str) -> bytes:
    return base64.b64decode(content, validate=True)


def _read_float(content: str) -> float:
    return float({"inf": "inf", "-inf": "-inf", "nan": "nan"}[content])


def _read_complex(content: Any) -> complex:
    real, imaginary = _list(content, 2)
    return complex(float(real), float(imaginary))


# Exactly these types: what is written of an instance of a derived class would be read as the base class.
_WRITERS: dict[type, Callable[[Any, str], Any]] = {
    float: lambda value, _: value if math.isfinite(value) else {"float": str(value)},
    list: _items,
    dict: _dict,
    tuple: lambda value, place: {"tuple": _items(value, place)},
    Counter: lambda value, place: {"counter": _pairs(value, place)},
    OrderedDict: lambda value, place: {"ordered": _pairs(value, place)},
    defaultdict: _default_dict,
    deque: lambda value, place: {"deque": [value.maxlen, _items(value, place)]},
    set: lambda value, place: {"set": _items(sorted(value, key=repr), place)},
    frozenset: lambda value, place: {"frozenset": _items(sorted(value, key=repr), place)},
    bytes: lambda value, _: {"bytes": base64.b64encode(value).decode()},
    complex: lambda value, _: {"complex": [str(value.real), str(value.imag)]},
    Tensor: _tensor,
    torch.nn.Parameter: _tensor,
    torch.dtype: lambda value, _: {"dtype": torch_name(value)},
    torch.device: lambda value, _: {"device": str(value)},
    torch.Size: lambda value, _: {"size": list(value)},
    np.ndarray: _array,
    type(Path()): lambda value, _: {"path": str(value)},
}
_READERS: dict[str, Callable[[Any], Any]] = {
    "float": _read_float,
    "dict": _read_dict,
    "pairs": _read_pairs,
    "tuple": lambda content: tuple(_read_items(content)),
    "set": lambda content: set(_read_items(content)),
    "frozenset": lambda content: frozenset(_read_items(content)),
    "counter": lambda content: Counter(_read_pairs(content)),
    "ordered": lambda content: OrderedDict(_read_pairs(content)),
    "defaultdict": _read_default_dict,
    "deque": _read_deque,
    "bytes": _read_bytes,
    "complex": _read_complex,
    "path": lambda content: Path(content),
    "tensor": _read_tensor,
    "array": _read_array,
    "numpy_number": lambda content: _read_array(content)[()],
    "dtype": lambda content: _TORCH_DTYPES[content],
    "device": lambda content: torch.device(str(content)),
    "size": _read_size,
}

"""Writing and reading the files of a record: tensors in the safetensors format, and events as lines of JSON.

The format is a header of 8 bytes (its length), JSON and raw bytes, written and read here with torch alone, because the
recorder also runs where safetensors is not installed."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_NAMES = {name: dtype for dtype, name in _DTYPES.items()}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes named tensors to a file, which appears under its name only when it is whole. One tensor after the other
    is copied to the CPU."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        dtype = _written_type(tensor)
        size = tensor.numel() * dtype.itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            if tensor.numel():
                value = tensor.detach().to("cpu", _written_type(tensor)).contiguous()
                file.write(value.reshape(-1).view(torch.uint8).numpy().data)
    unfinished.replace(path)


def _written_type(tensor: Tensor) -> torch.dtype:
    return tensor.dtype if tensor.dtype in _DTYPES else torch.float32


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a file of `write_tensors`. Raises ValueError if it is damaged."""
    data = bytearray(path.read_bytes())
    try:
        (length,) = struct.unpack_from("<Q", data)
        header = json.loads(bytes(data[8 : 8 + length]))
        return {name: _read_tensor(data, 8 + length, entry) for name, entry in header.items()}
    except (struct.error, KeyError, TypeError, AttributeError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


def _read_tensor(data: bytearray, base: int, entry: dict[str, Any]) -> Tensor:
    start, end = entry["data_offsets"]
    dtype, shape = _NAMES[entry["dtype"]], entry["shape"]
    if start == end:
        return torch.empty(shape, dtype=dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=end - start, offset=base + start)
    return raw.clone().view(dtype).reshape(shape)


class EventFile:
    """Appends events to a file, one JSON object in each line. Each line is on the disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, kind: str, step: int, **fields: Any) -> None:
        self._file.write(json.dumps({"kind": kind, "step": step, **fields}) + "\n")
        self._file.flush()


def read_events(path: Path) -> list[dict[str, Any]]:
    """Reads the events of a file. A last line that was cut off, because the process was killed, is left out."""
    events = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            events.append(event)
    return events

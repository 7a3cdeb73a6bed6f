"""What servers and workers say to each other, each time in one message of fixed size.

A server speaks first. Each `Reply` of it tells the worker what to do, with the newest weights; the worker answers each
with one `Told`, and behind that its gradients or what an evaluation found. Only the first server's replies say what to
do, the others bring their weights.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Self

import torch
from torch import Tensor

_ALIGNED = 64


class Do(IntEnum):
    STEP = 1
    EVALUATE = 2
    WAIT = 3  # there is nothing to do yet: a sign of life
    STOP = 4


class Said(IntEnum):
    GRADIENTS = 1
    EVALUATED = 2
    WAITED = 3
    ENDED = 4  # the data has no more batches


@dataclass(frozen=True)
class _Header:
    """Whole numbers and real ones in the order of their fields, as a few bytes."""

    def pack(self) -> Tensor:
        return torch.frombuffer(bytearray(self._struct().pack(*astuple(self))), dtype=torch.uint8)

    @classmethod
    def unpack(cls, data: Tensor) -> Self:
        return cls(*cls._struct().unpack(data.numpy().tobytes()))

    @classmethod
    def _struct(cls) -> struct.Struct:
        return struct.Struct("<" + "".join("d" if field.type is float else "q" for field in fields(cls)))

    @classmethod
    def size(cls) -> int:
        return cls._struct().size


@dataclass(frozen=True)
class Reply(_Header):
    """`clock`: how many batches are behind this worker; `epoch` and `index`: which one comes next. `version`: how many
    updates the weights have seen. `divided`: into how many parts the data is, by sample; 0: not at all. `part` of
    `parts` of the data is to be evaluated. `stepped`: whether the worker's gradients were used; `loss` and `norm` are
    of that step. `scale`, `good` and `skipped` are the fp16 loss's."""

    do: int = Do.WAIT
    version: int = 0
    clock: int = 0
    epoch: int = 0
    index: int = 0
    seed: int = 0
    divided: int = 0
    part: int = 0
    parts: int = 1
    stepped: int = 0
    good: int = 0
    skipped: int = 0
    scale: float = 0.0
    loss: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True)
class Told(_Header):
    """`version`: the weights that the gradients were computed on. The gradients are a sum, `count` what it is to be
    divided by (0: by nothing), `loss` a sum likewise. `unfit`: fp16 was too small for them, they are not to be used.
    `bytes` of an evaluation's findings follow, to the first server."""

    said: int = Said.WAITED
    version: int = 0
    clock: int = 0
    epoch: int = 0
    index: int = 0
    last: int = 0
    samples: int = 0
    unfit: int = 0
    bytes: int = 0
    peak_bytes: int = 0
    good: int = 0
    skipped: int = 0
    scale: float = 0.0
    count: float = 0.0
    loss: float = 0.0


class Frame:
    """A message in one stretch of memory, and the tensors in it as views."""

    def __init__(self, tensors: Iterable[tuple[str, tuple[int, ...], torch.dtype]], header: int = 0) -> None:
        places, end = [], _up(header)
        for name, shape, dtype in tensors:
            size = torch.Size(shape).numel() * dtype.itemsize
            places.append((name, shape, dtype, end, size))
            end = _up(end + size)
        self.memory = torch.zeros(end, dtype=torch.uint8)
        self.header = self.memory[:header]
        self.views = {
            name: self.memory[begin : begin + size].view(dtype).view(shape)
            for name, shape, dtype, begin, size in places
        }

    def __bool__(self) -> bool:
        return self.memory.numel() > 0


def of_tensors(tensors: Mapping[str, Tensor]) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    return [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def fill(views: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(source[name])


def _up(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED

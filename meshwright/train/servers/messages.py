"""The messages between servers and workers. A receiver knows the size of each message before it arrives.

A server sends first. Each `ServerReply` tells the worker what to do next and carries the newest weights. The worker
answers each reply with one `WorkerReport`, followed by its gradients or the result of an evaluation. It follows the
instruction of the first server, and takes only the weights from the replies of the other servers.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from enum import IntEnum
from typing import Literal, Self

import torch
from torch import Tensor

from meshwright.train.servers.assignment import ParameterRows

_ALIGNMENT_BYTES = 64


class Instruction(IntEnum):
    """What a reply tells the worker to do."""

    STEP = 1
    EVALUATE = 2
    WAIT = 3  # do nothing: the message only keeps the connection from timing out
    STOP = 4


class ReportKind(IntEnum):
    """What a worker reports."""

    GRADIENTS = 1
    EVALUATED = 2
    WAITED = 3
    OUT_OF_DATA = 4


@dataclass(frozen=True)
class _Header:
    """A message of integers and floats, which `pack` writes as bytes in the order of the fields."""

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
        """Number of bytes of a packed message."""
        return cls._struct().size


@dataclass(frozen=True)
class ServerReply(_Header):
    """What a server sends to a worker, before the weights.

    `version`: number of updates that the weights have received. `clock`: number of batches that the worker has
    completed. `epoch` and `index`: the batch that comes next. `data_parts`: number of fixed parts of the data set with
    `data.partition: sample`, otherwise 0. `part` and `parts`: which of how many parts of the evaluation set to
    evaluate. `stepped`: whether the worker's last gradients were used. `loss` and `norm`: mean loss and gradient norm
    of the update with these gradients. `scale`, `good` and `skipped`: the state of the fp16 loss scale.
    """

    instruction: int = Instruction.WAIT
    version: int = 0
    clock: int = 0
    epoch: int = 0
    index: int = 0
    seed: int = 0
    data_parts: int = 0
    part: int = 0
    parts: int = 1
    stepped: int = 0
    good: int = 0
    skipped: int = 0
    scale: float = 0.0
    loss: float = 0.0
    norm: float = 0.0


@dataclass(frozen=True)
class WorkerReport(_Header):
    """What a worker sends to a server, before its gradients or the result of an evaluation.

    `version`: that of the weights on which the gradients were computed. `epoch`, `index` and `last`: their batch.
    Gradients and `loss` are sums, to be divided by `count`, or not divided if it is 0. `overflow`: some gradient was
    not finite in fp16, so the gradients must not be used. `nonfinite`: the loss or some gradient was not finite, and
    the job leaves out such updates. `result_bytes`: size of the evaluation result that follows; 0 in reports to servers
    other than the first, which get no result. `scale`, `good` and `skipped`: the state of the worker's fp16 loss scale.
    """

    kind: int = ReportKind.WAITED
    version: int = 0
    clock: int = 0
    epoch: int = 0
    index: int = 0
    last: int = 0
    samples: int = 0
    overflow: int = 0
    nonfinite: int = 0
    result_bytes: int = 0
    peak_bytes: int = 0
    good: int = 0
    skipped: int = 0
    scale: float = 0.0
    count: float = 0.0
    loss: float = 0.0


@dataclass(frozen=True)
class TensorKey:
    """Identifies a tensor in a message: the weights, gradients, buffer or frozen parameter called `name`, or `USED`."""

    kind: Literal["weights", "gradients", "buffers", "frozen", "used"]
    name: str = ""


USED = TensorKey("used")  # has 1 for each of a server's parameters that has a gradient, and 0 for the others


@dataclass(frozen=True)
class TensorSpec:
    """Key, shape and dtype of a tensor in a message."""

    key: TensorKey
    shape: tuple[int, ...]
    dtype: torch.dtype


class MessageBuffer:
    """The memory of one message. `memory` is sent as a whole; `header` and the tensors in `views` share it."""

    def __init__(self, specs: Iterable[TensorSpec], header_bytes: int = 0) -> None:
        positions, end = [], _aligned(header_bytes)
        for spec in specs:
            size = torch.Size(spec.shape).numel() * spec.dtype.itemsize
            positions.append((spec, end, size))
            end = _aligned(end + size)
        self.memory = torch.zeros(end, dtype=torch.uint8)
        self.header = self.memory[:header_bytes]
        self.views = {
            spec.key: self.memory[begin : begin + size].view(spec.dtype).view(spec.shape)
            for spec, begin, size in positions
        }

    def __bool__(self) -> bool:
        return self.memory.numel() > 0

    @torch.no_grad()
    def fill(self, source: Mapping[TensorKey, Tensor]) -> None:
        """Copies the source tensor of the same key into each view."""
        for key, view in self.views.items():
            view.copy_(source[key])


def push_buffer(rows: Sequence[ParameterRows], buffers: Mapping[str, Tensor]) -> MessageBuffer:
    """Returns a buffer for a worker's gradients of one server's rows, and for the model `buffers` that it sends with
    them."""
    return MessageBuffer([_used_spec(rows), *_row_specs("gradients", rows), *_tensor_specs("buffers", buffers)])


def reply_buffer(rows: Sequence[ParameterRows], buffers: Mapping[str, Tensor], recorded: bool) -> MessageBuffer:
    """Returns a buffer for a server's reply with its weights and the model `buffers`. If steps are `recorded` for a
    proof, it also has room for the combined gradients."""
    gradients = [*_row_specs("gradients", rows), _used_spec(rows)] if recorded else []
    specs = [*_row_specs("weights", rows), *_tensor_specs("buffers", buffers), *gradients]
    return MessageBuffer(specs, header_bytes=ServerReply.size())


def frozen_buffer(parameters: Mapping[str, Tensor]) -> MessageBuffer:
    """Returns a buffer for the frozen parameters, which the first server sends to each worker once."""
    return MessageBuffer(_tensor_specs("frozen", parameters))


def _used_spec(rows: Sequence[ParameterRows]) -> TensorSpec:
    return TensorSpec(USED, (len(rows),), torch.uint8)


def _row_specs(kind: Literal["weights", "gradients"], rows: Sequence[ParameterRows]) -> list[TensorSpec]:
    return [TensorSpec(TensorKey(kind, part.name), part.shape, part.dtype) for part in rows]


def _tensor_specs(kind: Literal["buffers", "frozen"], tensors: Mapping[str, Tensor]) -> list[TensorSpec]:
    return [TensorSpec(TensorKey(kind, name), tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]


def _aligned(size: int) -> int:
    """The size rounded up, so that the next tensor's memory is aligned."""
    return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

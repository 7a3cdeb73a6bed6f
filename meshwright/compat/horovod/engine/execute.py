"""Runs groups of operations that all ranks have agreed upon: packs tensors into buffers, combines them over the ranks,
and unpacks the results. All of it happens in the engine's thread."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.engine import requests
from meshwright.compat.horovod.engine.adasum import adasum
from meshwright.compat.horovod.engine.data_group import DataGroup
from meshwright.compat.horovod.engine.operation import Operation, dtype_of
from meshwright.compat.horovod.engine.requests import ReduceOp, Request
from meshwright.compat.horovod.engine.timeline import Timeline
from meshwright.compat.horovod.engine.torch_private import byte_view

_BACKEND_OPS = {ReduceOp.MIN: "min", ReduceOp.MAX: "max", ReduceOp.PRODUCT: "product"}


def execute(operations: Sequence[Operation], details: Sequence[Any], group: DataGroup, timeline: Timeline) -> None:
    """Runs a group. Several operations in it are all-reduces of one type and process set. `details` are what
    `Negotiation` tells about each."""
    request = operations[0].request
    if request.kind == requests.ALLREDUCE:
        _all_reduce(operations, request, group, timeline)
    elif request.kind == requests.REDUCESCATTER:
        _reduce_scatter(operations[0], group, timeline)
    elif request.kind == requests.ALLGATHER:
        _all_gather(operations[0], details[0], group)
    elif request.kind == requests.BROADCAST:
        for tensor, output in zip(operations[0].inputs, operations[0].outputs, strict=True):
            if output is not tensor:
                output.copy_(tensor)
            group.broadcast(byte_view(output), request.root)
    elif request.kind == requests.ALLTOALL:
        _all_to_all(operations[0], details[0], group)
    else:  # the negotiation was the operation
        operations[0].value = details[0]


def zeros_for(request: Request, gpu: int) -> Operation:
    """Returns what a rank that has joined contributes: the tensors that change no result."""
    device = torch.device("cuda", gpu) if request.device == "cuda" else torch.device("cpu")
    tensors = []
    for name, shape in zip(request.dtypes, request.shapes, strict=True):
        dtype = dtype_of(name)
        limits: Any = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        neutral = {ReduceOp.MIN: limits.max, ReduceOp.MAX: limits.min, ReduceOp.PRODUCT: 1}.get(ReduceOp(request.op), 0)
        tensors.append(torch.full(shape, neutral, dtype=dtype, device=device))
    return Operation(request, tensors, tensors)


def _all_reduce(operations: Sequence[Operation], request: Request, group: DataGroup, timeline: Timeline) -> None:
    inputs = [tensor for operation in operations for tensor in operation.inputs]
    outputs = [tensor for operation in operations for tensor in operation.outputs]
    if request.op == ReduceOp.ADASUM:
        for tensor, output in zip(inputs, outputs, strict=True):
            combined = adasum(_scaled(tensor, request.prescale), group)
            output.copy_(_scaled(combined, request.postscale))
        return
    for dtype in dict.fromkeys(tensor.dtype for tensor in inputs):
        chosen = [position for position, tensor in enumerate(inputs) if tensor.dtype == dtype]
        _reduce([inputs[i] for i in chosen], [outputs[i] for i in chosen], request, group, timeline)


def _reduce(
    inputs: list[Tensor], outputs: list[Tensor], request: Request, group: DataGroup, timeline: Timeline
) -> None:
    """All-reduces tensors of one type through a buffer, in as many rounds as the buffer is too small."""
    op = _BACKEND_OPS.get(ReduceOp(request.op), "sum")
    dtype, device = inputs[0].dtype, inputs[0].device
    average = group.size if request.op == ReduceOp.AVERAGE else 1
    total = sum(tensor.numel() for tensor in inputs)
    if group.size == 1:
        for tensor, output in zip(inputs, outputs, strict=True):
            _unpack(_scaled(tensor, request.prescale), output, request.postscale, 1)
        return
    buffer = group.buffer(group.sum_dtype(dtype, device.type, op), total, device)
    for pieces in _rounds(inputs, outputs, buffer.numel()):
        timeline.begin("MEMCPY_IN_FUSION_BUFFER")
        views, position = [], 0
        for piece, _ in pieces:
            view = buffer[position : position + piece.numel()]
            _pack(piece, view, request.prescale)
            views.append(view)
            position += piece.numel()
        timeline.change(f"{group.describe(device.type, op)}_ALLREDUCE")
        group.reduce(buffer[:position], op)
        timeline.change("MEMCPY_OUT_FUSION_BUFFER")
        for view, (_, output) in zip(views, pieces, strict=True):
            _unpack(view, output, request.postscale, average)
        timeline.end()


def _rounds(inputs: list[Tensor], outputs: list[Tensor], capacity: int) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yields lists of (input, output) pieces, each list of at most `capacity` elements in total."""
    pieces: list[tuple[Tensor, Tensor]] = []
    room = capacity
    for tensor, output in zip(inputs, outputs, strict=True):
        source, target, begin = tensor.view(-1), output.view(-1), 0
        while begin < source.numel():
            end = min(begin + room, source.numel())
            pieces.append((source[begin:end], target[begin:end]))
            room -= end - begin
            begin = end
            if room == 0:
                yield pieces
                pieces, room = [], capacity
    if pieces:
        yield pieces


def _pack(tensor: Tensor, view: Tensor, factor: float) -> None:
    if factor == 1.0:
        view.copy_(tensor)
    elif tensor.is_floating_point():
        torch.mul(tensor, factor, out=view)
    else:
        view.copy_(_scaled(tensor, factor))


def _unpack(view: Tensor, output: Tensor, factor: float, divisor: int) -> None:
    if output.is_floating_point():
        scale = factor / divisor
        if scale == 1.0:
            output.copy_(view)
        elif view.dtype == output.dtype:
            torch.mul(view, scale, out=output)
        else:
            output.copy_(view.mul_(scale))
        return
    if divisor > 1:
        view = torch.div(view, divisor, rounding_mode="trunc")
    output.copy_(_scaled(view, factor))


def _scaled(tensor: Tensor, factor: float) -> Tensor:
    """Returns the tensor times the factor, in its type. Integers are truncated, as Horovod does."""
    if factor == 1.0:
        return tensor
    return tensor * factor if tensor.is_floating_point() else (tensor.double() * factor).to(tensor.dtype)


def _reduce_scatter(operation: Operation, group: DataGroup, timeline: Timeline) -> None:
    """Each rank keeps its rows of the all-reduced tensor. If there are fewer ranks than rows that are left over, the
    first ranks have one row more."""
    reduced = [torch.empty_like(tensor) for tensor in operation.inputs]
    whole = Operation(operation.request, operation.inputs, reduced)
    _all_reduce([whole], operation.request, group, timeline)
    for tensor in reduced:
        rows, rest = divmod(tensor.shape[0], group.size)
        begin = group.rank * rows + min(group.rank, rest)
        operation.outputs.append(tensor.narrow(0, begin, rows + (group.rank < rest)).clone())


def _all_gather(operation: Operation, rows_of_tensors: list[list[int]], group: DataGroup) -> None:
    for tensor, rows in zip(operation.inputs, rows_of_tensors, strict=True):
        shape = tensor.shape[1:]
        padded = tensor
        if len(set(rows)) > 1:  # backends gather tensors of one size
            padded = tensor.new_zeros((max(rows), *shape))
            padded[: tensor.shape[0]] = tensor
        pieces = group.all_gather(byte_view(padded))
        row_bytes = prod(shape) * tensor.element_size()
        flat = torch.cat([piece[: count * row_bytes] for piece, count in zip(pieces, rows, strict=True)])
        operation.outputs.append(flat.view(tensor.dtype).view(sum(rows), *shape))


def _all_to_all(operation: Operation, received: list[int], group: DataGroup) -> None:
    (tensor,) = operation.inputs
    shape, row_bytes = tensor.shape[1:], prod(tensor.shape[1:]) * tensor.element_size()
    sent = list(operation.request.splits)
    rows = byte_view(tensor[: sum(sent)]).view(sum(sent), row_bytes)
    output = group.all_to_all(rows, sent, received)
    operation.outputs.append(output.reshape(-1).view(tensor.dtype).view(sum(received), *shape))
    operation.value = received

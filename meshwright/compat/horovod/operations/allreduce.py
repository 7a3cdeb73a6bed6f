"""All-reduce: every rank gets the average, sum, Adasum, minimum, maximum or product of the tensors of all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.compression import Compression, Compressor
from meshwright.compat.horovod.engine.requests import ALLREDUCE, ReduceOp
from meshwright.compat.horovod.operations.allgather import allgather_async
from meshwright.compat.horovod.operations.start import (
    Average,
    check_adasum,
    check_reduce_op,
    keep_result,
    start,
    synchronize,
)
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set

Op = ReduceOp | int | None


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an all-reduce, and returns its handle. The tensor does not change."""
    outputs = [_empty_like(tensor)]
    return _start([tensor], outputs, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts an all-reduce that replaces the tensor, and returns its handle."""
    handle = _start([tensor], [tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    return keep_result(handle, lambda _: tensor)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Returns the all-reduced tensor. Its gradient is all-reduced in the same way."""
    compressed, context = compression.compress(tensor)
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    (reduced,) = _Allreduce.apply(options, compressed)
    return compression.decompress(reduced, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """All-reduces the tensor in place, and returns it."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: Tensor = synchronize(handle)
    return reduced


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts one all-reduce of several tensors, and returns its handle."""
    outputs = [_empty_like(tensor) for tensor in tensors]
    handle = _start(tensors, outputs, average, name, op, prescale_factor, postscale_factor, process_set)
    return keep_result(handle, lambda _: tuple(outputs))


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Starts one all-reduce that replaces several tensors, and returns its handle."""
    handle = _start(tensors, list(tensors), average, name, op, prescale_factor, postscale_factor, process_set)
    return keep_result(handle, lambda _: tuple(tensors))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Returns the tensors, all-reduced together."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    options = (average, name, op, prescale_factor, postscale_factor, process_set)
    reduced = _Allreduce.apply(options, *compressed)
    return [compression.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Op = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """All-reduces the tensors together and in place, and returns them."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    reduced: tuple[Tensor, ...] = synchronize(handle)
    return reduced


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: Op, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Starts to gather the values of sparse tensors. Returns a function that waits, and returns their sum or
    average."""
    sparse = tensor.detach()
    indices = sparse._indices().transpose(0, 1).contiguous()
    indices_handle = allgather_async(indices, f"{name}.indices", process_set)
    values_handle = allgather_async(sparse._values().contiguous(), f"{name}.values", process_set)

    def result() -> Tensor:
        values, gathered = synchronize(values_handle), synchronize(indices_handle)
        if op == Average:
            values = values / process_set.size()
        shape = sparse.shape
        return torch.sparse_coo_tensor(gathered.transpose(0, 1), values, shape, check_invariants=False)

    return result


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)


def _start(
    tensors: Sequence[Tensor],
    outputs: list[Tensor],
    average: bool | None,
    name: str | None,
    op: Op,
    prescale_factor: float,
    postscale_factor: float,
    process_set: ProcessSet,
) -> int:
    chosen = check_reduce_op(op, average)
    if chosen == ReduceOp.ADASUM:
        check_adasum(process_set)
    factors = {"prescale": float(prescale_factor), "postscale": float(postscale_factor)}
    return start(ALLREDUCE, tensors, outputs, name, process_set, op=int(chosen), **factors)


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        result: tuple[Tensor, ...] = synchronize(grouped_allreduce_async(tensors, *options))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        average, _, op, prescale_factor, postscale_factor, process_set = ctx.options
        contiguous = [gradient.contiguous() for gradient in gradients]
        options = (average, None, op, prescale_factor, postscale_factor, process_set)
        return None, *_Allreduce.apply(options, *contiguous)

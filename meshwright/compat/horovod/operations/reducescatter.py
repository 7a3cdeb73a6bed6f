"""Reduce-scatter: the tensors of all ranks are combined as by an all-reduce, and each rank gets some rows of the
result. If the rows are not a multiple of the ranks, the first ranks get one row more."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.compression import Compression, Compressor
from meshwright.compat.horovod.engine.requests import REDUCESCATTER, ReduceOp
from meshwright.compat.horovod.operations.allgather import grouped_allgather_async
from meshwright.compat.horovod.operations.start import Average, keep_result, start, synchronize
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set

Op = ReduceOp | int


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts a reduce-scatter, and returns its handle."""
    return _start([tensor], name, op, process_set, prescale_factor, postscale_factor)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Returns this rank's rows of the combined tensor. Gradients are gathered from all ranks."""
    compressed, context = compression.compress(tensor)
    (reduced,) = _Reducescatter.apply((name, op, process_set, prescale_factor, postscale_factor), compressed)
    return compression.decompress(reduced, context)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Starts one reduce-scatter of several tensors, and returns its handle."""
    handle = _start(tensors, name, op, process_set, prescale_factor, postscale_factor)
    return keep_result(handle, lambda operation: tuple(operation.outputs))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] = Compression.none,
    op: Op = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Returns this rank's rows of several tensors that are combined together."""
    compressed, contexts = zip(*map(compression.compress, tensors), strict=True)
    reduced = _Reducescatter.apply((name, op, process_set, prescale_factor, postscale_factor), *compressed)
    return [compression.decompress(tensor, context) for tensor, context in zip(reduced, contexts, strict=True)]


def _start(
    tensors: Sequence[Tensor], name: str | None, op: Op, process_set: ProcessSet, prescale: float, postscale: float
) -> int:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter scatters rows, and a tensor without dimensions has none: call .unsqueeze(0)")
    if op == ReduceOp.ADASUM:
        raise RuntimeError("reducescatter does not combine with Adasum: choose another op, or allreduce")
    factors = {"prescale": float(prescale), "postscale": float(postscale)}
    return start(REDUCESCATTER, tensors, [], name, process_set, op=int(op), **factors)


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.options = options
        result: tuple[Tensor, ...] = synchronize(grouped_reducescatter_async(tensors, *options))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _, op, process_set, prescale, postscale = ctx.options
        factor = prescale * postscale * (process_set.size() if op == ReduceOp.SUM else 1)
        scaled = [(gradient * factor).contiguous() for gradient in gradients]
        return None, *synchronize(grouped_allgather_async(scaled, None, process_set))

"""All-gather: every rank gets the rows of the tensors of all ranks, in the order of the ranks. Ranks may have different
numbers of rows."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.engine.requests import ALLGATHER, ALLREDUCE, ReduceOp
from meshwright.compat.horovod.operations.start import keep_result, start, synchronize
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Starts to gather, and returns a handle."""
    return _start([tensor], name, process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Returns the rows of all ranks. The gradient is averaged over the ranks, and each rank gets that of its rows."""
    (gathered,) = _Allgather.apply(name, process_set, tensor)
    assert isinstance(gathered, Tensor)
    return gathered


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts to gather several tensors together, and returns a handle."""
    return keep_result(_start(tensors, name, process_set), lambda operation: tuple(operation.outputs))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Returns the rows of all ranks of several tensors."""
    gathered: tuple[Tensor, ...] = _Allgather.apply(name, process_set, *tensors)
    return gathered


def _start(tensors: Sequence[Tensor], name: str | None, process_set: ProcessSet) -> int:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("allgather gathers rows, and a tensor without dimensions has none: call .unsqueeze(0)")
    return start(ALLGATHER, tensors, [], name, process_set)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, name: str | None, process_set: ProcessSet, *tensors: Tensor) -> tuple[Tensor, ...]:
        result: tuple[Tensor, ...] = synchronize(grouped_allgather_async(tensors, name, process_set))
        ctx.rows, ctx.process_set = [tensor.shape[0] for tensor in tensors], process_set
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        rows = torch.tensor(ctx.rows, dtype=torch.int64, device="cpu").unsqueeze(0)
        rows_of_ranks = synchronize(allgather_async(rows, None, ctx.process_set))
        first = rows_of_ranks[: ctx.process_set.rank()].sum(0).tolist()
        averaged = [torch.empty_like(gradient, memory_format=torch.contiguous_format) for gradient in gradients]
        contiguous = [gradient.contiguous() for gradient in gradients]
        synchronize(start(ALLREDUCE, contiguous, averaged, None, ctx.process_set, op=int(ReduceOp.AVERAGE)))
        own = [
            gradient.narrow(0, begin, count) for gradient, begin, count in zip(averaged, first, ctx.rows, strict=True)
        ]
        return None, None, *own

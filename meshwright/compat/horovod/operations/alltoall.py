"""All-to-all: every rank sends some of its rows to each rank."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.engine.requests import ALLTOALL
from meshwright.compat.horovod.operations.start import keep_result, start, synchronize
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set, registered_ranks

Splits = Tensor | Sequence[int] | None


def alltoall_async(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts an all-to-all, and returns its handle. `splits` is the number of rows for each rank of the process set;
    without it, all get equally many. `synchronize` returns the received rows, and how many came from each rank."""
    counts = _counts(tensor, splits, len(registered_ranks(process_set.process_set_id)))
    handle = start(ALLTOALL, [tensor], [], name, process_set, splits=counts)
    device = splits.device if isinstance(splits, Tensor) else torch.device("cpu")
    return keep_result(
        handle, lambda done: (done.outputs[0], torch.tensor(done.value, dtype=torch.int32, device=device))
    )


def alltoall(
    tensor: Tensor, splits: Splits = None, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Returns the received rows; with `splits` also how many came from each rank. Gradients go the way back."""
    received, received_splits = _Alltoall.apply(tensor, splits, name, process_set)
    return received if splits is None else (received, received_splits)


def _counts(tensor: Tensor, splits: Splits, size: int) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError("alltoall sends rows, and a tensor without dimensions has none: call .unsqueeze(0)")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall without splits needs a multiple of {size} rows, and the tensor has {rows}")
        return (rows // size,) * size
    if isinstance(splits, Tensor) and splits.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"splits of alltoall are int32 or int64, not {splits.dtype}")
    counts = tuple(int(count) for count in splits)
    if len(counts) != size or min(counts) < 0 or sum(counts) > rows:
        raise ValueError(
            f"splits of alltoall are {list(counts)}: give one number of rows for each of {size} ranks, with a sum of"
            f" at most {rows}, the rows of the tensor"
        )
    return counts


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, splits: Splits, name: str | None, process_set: ProcessSet
    ) -> tuple[Tensor, Tensor]:
        received, received_splits = synchronize(alltoall_async(tensor, splits, name, process_set))
        ctx.received_splits, ctx.process_set, ctx.rows = received_splits, process_set, tensor.shape[0]
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        returned, _ = synchronize(alltoall_async(gradient, ctx.received_splits, None, ctx.process_set))
        if returned.shape[0] < ctx.rows:  # rows that were sent to no rank
            returned = torch.cat([returned, returned.new_zeros((ctx.rows - returned.shape[0], *returned.shape[1:]))])
        return returned, None, None, None

"""Broadcast: every rank gets the tensor of one rank."""

from typing import Any

import torch
from torch import Tensor

from meshwright.compat.horovod.engine.requests import ALLREDUCE, BROADCAST, ReduceOp
from meshwright.compat.horovod.operations.start import keep_result, start, synchronize
from meshwright.compat.horovod.process_sets import ProcessSet, global_process_set
from meshwright.compat.horovod.state import horovod


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast, and returns its handle. The tensor does not change. `root_rank` is a global rank, also for a
    process set."""
    output = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return start(BROADCAST, [tensor], [output], name, process_set, root=root_rank)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Starts a broadcast that replaces the tensor, and returns its handle."""
    handle = start(BROADCAST, [tensor], [tensor], name, process_set, root=root_rank)
    return keep_result(handle, lambda _: tensor)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Returns the tensor of the root rank. Its gradient is averaged over the ranks, and goes to the root rank."""
    result = _Broadcast.apply(tensor, root_rank, name, process_set)
    assert isinstance(result, Tensor)
    return result


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Replaces the tensor by that of the root rank, and returns it."""
    result: Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, root_rank: int, name: str | None, process_set: ProcessSet) -> Tensor:
        ctx.root_rank, ctx.process_set = root_rank, process_set
        result: Tensor = synchronize(broadcast_async(tensor, root_rank, name, process_set))
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        averaged = torch.empty_like(gradient)
        synchronize(start(ALLREDUCE, [gradient], [averaged], None, ctx.process_set, op=int(ReduceOp.AVERAGE)))
        if horovod.placement.rank != ctx.root_rank:
            averaged.zero_()
        return averaged, None, None, None

"""The interfaces of torch that are private or have no type stubs, and that this package uses. They were seen to work
with torch 2.13. Process groups are made without registering them with torch.distributed, whose state belongs to the
script."""

from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.processes.torch_private import gloo_group

REDUCE_OPS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "product": dist.ReduceOp.PRODUCT,
}


class RawGroup:
    """A process group of one backend. Every method waits until its collective is done; on CUDA it makes the current
    stream wait instead."""

    def __init__(self, backend: str, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self._group: Any
        if backend == "nccl":
            nccl: Any = dist.ProcessGroupNCCL
            options = nccl.Options()
            options._timeout = timeout
            self._group = nccl(store, rank, size, options)
        else:
            self._group = gloo_group(store, rank, size, timeout)

    def all_reduce(self, flat: Tensor, op: str) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = REDUCE_OPS[op]
        self._group.allreduce([flat], options).wait()

    def all_gather(self, outputs: list[Tensor], tensor: Tensor) -> None:
        self._group.allgather([outputs], [tensor]).wait()

    def broadcast(self, tensor: Tensor, root: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._group.broadcast([tensor], options).wait()

    def all_to_all(self, output: Tensor, tensor: Tensor, received: list[int], sent: list[int]) -> None:
        self._group.alltoall_base(output, tensor, received, sent, dist.AllToAllOptions()).wait()

    def exchange(self, outgoing: Tensor, incoming: Tensor, peer: int) -> None:
        """Sends a tensor to a rank of the group and receives one from it. The lower rank sends first."""
        if self.rank < peer:
            self._group.send([outgoing], peer, 0).wait()
            self._group.recv([incoming], peer, 0).wait()
        else:
            self._group.recv([incoming], peer, 0).wait()
            self._group.send([outgoing], peer, 0).wait()

    def abort(self) -> None:
        """Ends collectives that wait for a rank which is gone."""
        with suppress(RuntimeError, AttributeError):  # Gloo may have none: its connections close with the group
            self._group.abort()
        self._group = None


def byte_view(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor's memory as bytes, so that any type can be sent."""
    return tensor.reshape(-1).view(torch.uint8)

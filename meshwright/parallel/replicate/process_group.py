"""The process group that DDP gets if ranks share memory. It sums small int32 CPU tensors through shared memory, and
forwards all other collectives to the ordinary group.

With `find_unused_parameters`, DDP sums at the end of every backward pass which parameters each rank has used, and waits
for the result. Through Gloo that wait takes longer than averaging all gradients through shared memory.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.small_sums import SharedMemorySums


class GroupWithSharedSums(dist.ProcessGroup):
    """Wraps `group`: all-reduces of small int32 CPU tensors go through `sums`, everything else through `group`."""

    def __init__(self, group: dist.ProcessGroup, sums: SharedMemorySums) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._group = group
        self._sums = sums

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        tensor = tensors[0]
        is_small = tensor.numel() * torch.int64.itemsize <= self._sums.LARGEST_BYTES
        if tensor.dtype == torch.int32 and tensor.device.type == "cpu" and is_small:
            return _SumWork(tensor, self._sums.start(tensor.long()))
        return self._group.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._group.broadcast(tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._group.allgather(outputs, inputs, opts)

    def getBackendName(self) -> str:
        return "gloo with shared sums"  # not "gloo": of groups with that name DDP calls what only torch's own have


class _SumWork(dist.Work):
    """A started sum, which is copied into `target` when it is waited for."""

    def __init__(self, target: Tensor, result: Callable[[], Tensor]) -> None:
        super().__init__()
        self._target = target
        self._result = result

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._target.copy_(self._result())
        return True

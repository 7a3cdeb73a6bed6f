"""The process group that DDP is given where ranks share memory: as the one it stands for, but for small sums.

With `find_unused_parameters` DDP adds up, at the end of every backward pass, which parameters each rank has used, and
waits for it. Through Gloo that wait is longer than all gradients take in shared memory.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.sums import SharedSums


class Beside(dist.ProcessGroup):
    def __init__(self, group: dist.ProcessGroup, sums: SharedSums) -> None:
        super().__init__(group.rank(), group.size())  # type: ignore[call-arg]
        self._beside = group
        self._sums = sums

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        used = tensors[0]
        small = used.numel() * torch.int64.itemsize <= self._sums.LARGEST_BYTES
        if used.dtype == torch.int32 and used.device.type == "cpu" and small:
            return _Sum(used, self._sums.start(used.long()))
        return self._beside.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:  # type: ignore[override]
        return self._beside.broadcast(tensors, opts)

    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        return self._beside.allgather(outputs, inputs, opts)

    def getBackendName(self) -> str:
        return "beside gloo"  # of another name, since DDP asks a group of that name for what only torch's own has


class _Sum(dist.Work):
    def __init__(self, into: Tensor, result: Callable[[], Tensor]) -> None:
        super().__init__()
        self._into = into
        self._result = result

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        self._into.copy_(self._result())
        return True

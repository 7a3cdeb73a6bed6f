"""`ServerGroup`: the communication of the servers with each other. The first server is the coordinator, and the other
servers do what it broadcasts."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError
from meshwright.messages.exchange import from_bytes_tensor, to_bytes_tensor
from meshwright.processes.torch_private import gloo_group


class ServerGroup:
    """This server's `rank` among `size` servers, and collectives between them. The collectives work in place; with only
    one server they do nothing."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None
        if size > 1:
            # The coordinator may wait for workers up to the timeout. So the other servers must wait longer for it.
            timeout = timedelta(seconds=2 * timeout_s)
            self._group = gloo_group(dist.PrefixStore("team", store), rank, size, timeout)

    @property
    def is_coordinator(self) -> bool:
        return self.rank == 0

    def broadcast(self, numbers: Tensor) -> Tensor:
        """Overwrites `numbers` with those of the coordinator, and returns it."""
        if self._group is not None:
            self._wait(self._group.broadcast(numbers, 0))
        return numbers

    def minimum(self, numbers: Tensor) -> Tensor:
        return self._all_reduce(numbers, dist.ReduceOp.MIN)

    def sum(self, numbers: Tensor) -> Tensor:
        return self._all_reduce(numbers, dist.ReduceOp.SUM)

    def broadcast_value(self, value: Any) -> Any:
        """Returns the coordinator's `value`, which must be plain (plain_values.py), on every server."""
        if self.size == 1:
            return value
        data = to_bytes_tensor(value if self.is_coordinator else None)
        size = self.broadcast(torch.tensor([data.numel()]))
        received = data if self.is_coordinator else torch.empty(int(size), dtype=torch.uint8)
        self.broadcast(received)
        return from_bytes_tensor(received)

    def _all_reduce(self, numbers: Tensor, operation: Any) -> Tensor:
        if self._group is not None:
            self._wait(self._group.allreduce([numbers], operation))
        return numbers

    def _wait(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"server {self.rank}: the connection to the other servers broke: {error}") from error

"""The servers among themselves: the first one leads, and the others do what it says."""

import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError


class Team:
    """`rank` of `size` servers; one alone has nobody to ask."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_s: float) -> None:
        self.rank = rank
        self.size = size
        self._group: Any = None  # what torch says of its own groups leaves out what they do
        if size > 1:
            # The first one gives up on workers after the timeout: the others must not give up on it before.
            self._group = dist.ProcessGroupGloo(
                dist.PrefixStore("team", store), rank, size, timedelta(seconds=2 * timeout_s)
            )

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def from_first(self, numbers: Tensor) -> Tensor:
        if self._group is not None:
            self._waited(self._group.broadcast(numbers, 0))
        return numbers

    def least(self, numbers: Tensor) -> Tensor:
        return self._reduced(numbers, dist.ReduceOp.MIN)

    def total(self, numbers: Tensor) -> Tensor:
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def told(self, value: Any) -> Any:
        """The first one's value, on every server."""
        if self.size == 1:
            return value
        data = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        size = self.from_first(torch.tensor([data.numel()]))
        box = data if self.leads else torch.empty(int(size), dtype=torch.uint8)
        self.from_first(box)
        return value if self.leads else pickle.loads(box.numpy().tobytes())

    def _reduced(self, numbers: Tensor, operation: Any) -> Tensor:
        if self._group is not None:
            self._waited(self._group.allreduce([numbers], operation))
        return numbers

    def _waited(self, work: dist.Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise CollectiveError(f"server {self.rank}: the connection to the other servers broke: {error}") from error

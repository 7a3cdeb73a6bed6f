"""What a loss or a metric sees of the other ranks' samples, where it compares samples with each other."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.exchange import Team, even, gather_in


class Across:
    """Called with this rank's rows, gives those of all data ranks in their order, and where its own begin.

    The gradient is exact: what every rank's loss says about a row goes back to the rank that has it.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._team = Team(group, group.rank(), group.size(), "data")

    def __call__(self, rows: Tensor) -> tuple[Tensor, int]:
        lengths = self._lengths(len(rows))
        return gather_in(rows.contiguous(), even(0, lengths), self._team), sum(lengths[: self._team.rank])

    def _lengths(self, own: int) -> list[int]:
        """A short batch does not divide evenly, and a rank may have nothing of it."""
        told = [torch.zeros(1, dtype=torch.int64) for _ in range(self._team.ranks)]
        dist.all_gather(told, torch.tensor([own]), group=self._team.group)
        return [int(length) for length in told]


def alone(rows: Tensor) -> tuple[Tensor, int]:
    """`Across` of one rank."""
    return rows, 0

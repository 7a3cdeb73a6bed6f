"""Gathers the samples of all data ranks, for a loss or metric that compares samples with each other."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.differentiable_collectives import AxisGroup, all_gather_for_sharded_work, consecutive_ranges


class GatherSamples:
    """A callable that takes this rank's rows (one per sample) and returns the rows of all data ranks, in the order of
    the ranks, and the index of this rank's first row among them. All data ranks call it together.

    Gradients flow back through it: the gradients that a row gets from the losses of all ranks are summed on the rank
    that the row came from.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = AxisGroup(group, group.rank(), group.size(), "data")

    def __call__(self, rows: Tensor) -> tuple[Tensor, int]:
        counts = self._row_counts(len(rows))
        gathered = all_gather_for_sharded_work(rows.contiguous(), consecutive_ranges(0, counts), self.group)
        return gathered, sum(counts[: self.group.rank])

    def _row_counts(self, row_count: int) -> list[int]:
        """The number of rows of each rank. They differ if the batch does not divide evenly; some may be 0."""
        counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.group.size)]
        dist.all_gather(counts, torch.tensor([row_count]), group=self.group.process_group)
        return [int(count) for count in counts]

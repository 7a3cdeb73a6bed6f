"""Evaluation over several ranks: which batches each rank runs, and how their totals are combined."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.batch import Microbatch
from meshwright.train.metrics import MetricTotals


class EvaluationBatches:
    """Iterates over the evaluation batches of one rank, until they end or `interrupted` returns True. In the latter
    case, `gave_up` is True afterwards.

    With `same_count` every rank runs as many batches as the rank that has the most, because the ranks communicate in
    every batch. A rank that has no more batches repeats one with weight 0 (`samples` is 0). An interruption of any rank
    then stops all ranks.
    """

    def __init__(self, local: Iterator[Microbatch], interrupted: Callable[[], bool], same_count: bool) -> None:
        self._local = local
        self._interrupted = interrupted
        self._same_count = same_count
        self.gave_up = False

    def __iter__(self) -> Iterator[Microbatch]:
        filler: Microbatch | None = None
        while True:
            batch = next(self._local, None)
            any_has_batch, self.gave_up, any_needs_filler = self._agree(
                batch is not None, filler is None and batch is None
            )
            if self.gave_up or not any_has_batch:
                return
            if any_needs_filler:
                first_batch = _batch_of_first_rank(batch)  # a collective: every rank takes part
                filler = filler or replace(first_batch, samples=0)
            if batch is None:
                assert filler is not None
                yield filler
                continue
            yield batch
            filler = replace(batch, samples=0)

    def _agree(self, has_batch: bool, needs_filler: bool) -> tuple[bool, bool, bool]:
        """Returns three flags: whether any rank has a batch, is interrupted, and needs a filler batch (one with weight
        0). Without `same_count` the ranks do not communicate, and the flags are those of this rank."""
        stop = self._interrupted()
        if not self._same_count:
            return has_batch, stop, False
        flags = torch.tensor([has_batch, stop, needs_filler], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        has_batch, stop, needs_filler = (bool(flag) for flag in flags.tolist())
        return has_batch, stop, needs_filler


def _batch_of_first_rank(batch: Microbatch | None) -> Microbatch:
    """Broadcasts the batch of rank 0, and returns it. It is the filler of ranks that never had a batch. Rank 0 has a
    batch, because it gets one whenever any rank does."""
    batches: list[Any] = [batch]
    dist.broadcast_object_list(batches, src=0)
    first: Microbatch = batches[0]
    return first


def combine_totals(local: MetricTotals, gave_up: bool, ranks: int) -> dict[str, float] | None:
    """Returns the metrics by name over all ranks; None if any rank gave up. Names are sent with the totals, because a
    rank that evaluated nothing does not know the names of the metrics."""
    if ranks == 1:
        return None if gave_up else local.finish(local.totals())
    mine = (gave_up, {name: total.cpu() for name, total in local.totals().items()})
    of_ranks: list[Any] = [None] * ranks
    dist.all_gather_object(of_ranks, mine)
    if any(rank_gave_up for rank_gave_up, _ in of_ranks):
        return None
    totals: dict[str, Tensor] = {}
    for _, rank_totals in of_ranks:
        for name, total in rank_totals.items():
            totals[name] = totals[name] + total if name in totals else total
    return local.finish(totals)

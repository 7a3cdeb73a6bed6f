"""Evaluation over ranks: who runs which batch, and one set of totals in the end."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.batch import Microbatch
from meshwright.train.metrics import Tally


class Rounds:
    """A rank's batches, until they end or `interrupted` says so on any rank; `gave_up` tells which.

    With `together` every rank runs as many batches as the one that has the most, since they need each other in each:
    one that has no more takes part with one it had, of which no sample counts.
    """

    def __init__(self, own: Iterator[Microbatch], interrupted: Callable[[], bool], together: bool) -> None:
        self._own = own
        self._interrupted = interrupted
        self._together = together
        self.gave_up = False

    def __iter__(self) -> Iterator[Microbatch]:
        borrowed: Microbatch | None = None
        while True:
            part = next(self._own, None)
            any_left, self.gave_up, any_without = self._agreed(part is not None, borrowed is None and part is None)
            if self.gave_up or not any_left:
                return
            if any_without:
                given = _from_first(part)
                borrowed = borrowed or replace(given, samples=0)
            if part is None:
                assert borrowed is not None
                yield borrowed
                continue
            yield part
            borrowed = replace(part, samples=0)

    def _agreed(self, left: bool, without: bool) -> tuple[bool, bool, bool]:
        stop = self._interrupted()
        if not self._together:
            return left, stop, False
        flags = torch.tensor([left, stop, without], dtype=torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        left, stop, without = (bool(flag) for flag in flags.tolist())
        return left, stop, without


def _from_first(part: Microbatch | None) -> Microbatch:
    """A batch for ranks that never had one: that of the first, which never goes without."""
    given: list[Any] = [part]
    dist.broadcast_object_list(given, src=0)
    found: Microbatch = given[0]
    return found


def combine(tally: Tally, gave_up: bool, ranks: int) -> dict[str, float] | None:
    """One rank's totals with those of the others. A rank that evaluated nothing knows no names, so the names
    travel with the totals."""
    if ranks == 1:
        return None if gave_up else tally.finish(tally.totals())
    mine = (gave_up, {name: total.cpu() for name, total in tally.totals().items()})
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, mine)
    if any(part[0] for part in parts):
        return None
    totals: dict[str, Tensor] = {}
    for _, part in parts:
        for name, total in part.items():
            totals[name] = totals[name] + total if name in totals else total
    return tally.finish(totals)

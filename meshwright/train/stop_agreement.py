"""`StopAgreement`: lets all ranks stop at the same step, although a signal may reach them at different steps."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """An all-reduce that starts before a step and ends after it, so that it overlaps with the step. Its result is the
    same on every rank: whether any of them had a stop request when it started."""

    def __init__(self, ranks: int, is_requested: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._is_requested = is_requested
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def start(self) -> None:
        if self._ranks > 1:
            self._flag.fill_(int(self._is_requested()))
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)

    def result(self) -> bool:
        """Whether all ranks stop now."""
        if self._ranks == 1:
            return self._is_requested()
        assert self._work is not None
        self._work.wait()
        return bool(self._flag.item())

"""`StopAgreement`: lets all ranks stop at the same step, although a signal may reach them at different steps."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """Decides after each step whether all ranks stop: they do if any rank had a stop request when the step began.
    `start` is called before the step and starts an all-reduce, which overlaps with the step; `result` is called after
    the step."""

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
        """Waits for the all-reduce. Returns whether to stop now, which is the same on all ranks."""
        if self._ranks == 1:
            return self._is_requested()
        assert self._work is not None
        self._work.wait()
        return bool(self._flag.item())

"""At which step all ranks stop: a signal may reach them at different steps, but they must leave together."""

from collections.abc import Callable

import torch
import torch.distributed as dist


class StopAgreement:
    """Asked before a step and answered after it, so the exchange hides behind the step's own work. Every rank
    gets the same answer: whether any of them had been asked to stop."""

    def __init__(self, ranks: int, requested: Callable[[], bool]) -> None:
        self._ranks = ranks
        self._requested = requested
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None

    def ask(self) -> None:
        if self._ranks > 1:
            self._flag.fill_(int(self._requested()))
            self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, async_op=True)

    def answer(self) -> bool:
        if self._ranks == 1:
            return self._requested()
        assert self._work is not None
        self._work.wait()
        return bool(self._flag.item())

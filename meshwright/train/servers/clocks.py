"""How far every worker is, and who may go on. No torch and no threads: plain numbers.

A worker's clock is the number of global batches that it has left behind. The run's step is their mean, rounded down:
when W workers have each taken their share of k batches, k batches' worth of samples was trained on.
"""

from collections.abc import Mapping


class Clocks:
    """`bound`: how far a worker may be ahead of the slowest when it goes on; None for no bound."""

    def __init__(self, bound: int | None = None, total: int | None = None) -> None:
        self.bound = bound
        self.total = total
        self.alive: dict[int, int] = {}
        self.ended: set[int] = set()  # those whose data has no more batches
        self.largest_lead = 0
        self._step = 0

    def start_at(self, step: int) -> None:
        self._step = step

    def join(self, worker: int, clock: int | None = None) -> int:
        """Whoever comes back takes its place beside the slowest, so that nobody is too far ahead of it."""
        self.ended.discard(worker)
        self.alive[worker] = clock if clock is not None else min(self.alive.values(), default=self._step)
        return self.alive[worker]

    def drop(self, worker: int) -> None:
        self.alive.pop(worker, None)

    def advance(self, worker: int) -> None:
        self.alive[worker] += 1

    @property
    def step(self) -> int:
        """Never goes back: when a worker is dropped, those that are left may be behind its mean."""
        if self.alive:
            self._step = max(self._step, sum(self.alive.values()) // len(self.alive))
        return self._step

    def finished(self, worker: int) -> bool:
        return worker in self.ended or (self.total is not None and self.alive[worker] >= self.total)

    @property
    def over(self) -> bool:
        """Whether nobody who is left has anything to do."""
        return bool(self.alive) and all(self.finished(worker) for worker in self.alive)

    def lead(self, worker: int, after: Mapping[int, int] | None = None) -> int:
        clocks = after or self.alive
        return clocks[worker] - min(clocks.values())

    def may_go_on(self, worker: int, after: Mapping[int, int] | None = None) -> bool:
        """`after`: the clocks as they are about to be."""
        return self.bound is None or self.lead(worker, after) <= self.bound

    def go_on(self, worker: int) -> None:
        """It is told to: the bound is held here, whoever decided it."""
        lead = self.lead(worker)
        assert self.bound is None or lead <= self.bound, f"worker {worker} is {lead} steps ahead, {self.bound} allowed"
        self.largest_lead = max(self.largest_lead, lead)

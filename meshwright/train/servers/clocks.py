"""Counts how many batches every worker has completed, and decides which workers may continue. It uses neither torch nor
threads.

A worker's clock is the number of global batches of which it has completed its share. The run's step is the mean of the
clocks, rounded down: when W workers have each completed their share of k batches, the run has trained on k global
batches.
"""

from collections.abc import Mapping


class WorkerClocks:
    """The clocks of all workers that take part. `bound` is the largest number of batches that a worker may be ahead of
    the slowest one when it is told to continue; None means no bound. `total` is the clock at which a worker is
    finished; None means that it is finished only when its data ends. `largest_lead` is the largest number of batches
    that a worker was ahead when it was told to continue."""

    def __init__(self, bound: int | None = None, total: int | None = None) -> None:
        self.bound = bound
        self.total = total
        self.by_worker: dict[int, int] = {}
        self.out_of_data: set[int] = set()  # workers whose data has no more batches
        self.largest_lead = 0
        self._step = 0

    def start_at(self, step: int) -> None:
        """Sets the run's step when it is resumed."""
        self._step = step

    def add(self, worker: int, clock: int | None = None) -> int:
        """Adds a worker and returns its clock. Without a `clock` it gets the clock of the slowest worker, so that its
        return does not put other workers too far ahead."""
        self.out_of_data.discard(worker)
        self.by_worker[worker] = clock if clock is not None else min(self.by_worker.values(), default=self._step)
        return self.by_worker[worker]

    def remove(self, worker: int) -> None:
        self.by_worker.pop(worker, None)

    def advance(self, worker: int) -> None:
        self.by_worker[worker] += 1

    @property
    def step(self) -> int:
        """The run's step. It never decreases, even when the mean does because a worker was removed."""
        if self.by_worker:
            self._step = max(self._step, sum(self.by_worker.values()) // len(self.by_worker))
        return self._step

    def is_finished(self, worker: int) -> bool:
        return worker in self.out_of_data or (self.total is not None and self.by_worker[worker] >= self.total)

    @property
    def all_finished(self) -> bool:
        """Whether there are workers and all of them are finished."""
        return bool(self.by_worker) and all(self.is_finished(worker) for worker in self.by_worker)

    def steps_ahead(self, worker: int, clocks: Mapping[int, int] | None = None) -> int:
        """How many batches a worker is ahead of the slowest one. `clocks` None means the current clocks."""
        clocks = clocks or self.by_worker
        return clocks[worker] - min(clocks.values())

    def may_continue(self, worker: int, clocks: Mapping[int, int] | None = None) -> bool:
        """Whether `bound` lets a worker continue. `clocks` are the clocks after an update that is about to be made;
        None means the current clocks."""
        return self.bound is None or self.steps_ahead(worker, clocks) <= self.bound

    def note_continued(self, worker: int) -> None:
        """Asserts that a worker that is told to continue is within `bound`, and updates `largest_lead`."""
        ahead = self.steps_ahead(worker)
        assert self.bound is None or ahead <= self.bound, (
            f"worker {worker} is {ahead} steps ahead, {self.bound} allowed"
        )
        self.largest_lead = max(self.largest_lead, ahead)

"""`AdaptiveShares`: lets the shares of the ranks follow their speeds while a session trains (`shares.adaptive`).

After every `WINDOW` steps the ranks exchange how fast they were, and each of them makes the same decision
(`controller.py`). Loaders have read ahead by then, each rank's by another number of batches. So new shares begin with a
later batch, which no loader can have reached. Its number is the same on every rank. Batches are numbered by the steps
that train on them: the first batch of a loop has the number of steps that the session has made.

A decision is told to `on_decision` before any batch is divided by it. A run writes it down there, and `repeat` makes
the same decisions again when these steps are repeated after a restart.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from meshwright.data.batch import Batch, LoadingOptions
from meshwright.data.share_table import ROWS, ShareTable
from meshwright.errors import InputError
from meshwright.parallel.model import ParallelModel
from meshwright.plan_fields.shares import share_sizes
from meshwright.train.shares.controller import SpeedState, decide, observe
from meshwright.train.shares.step_clock import DeviceClock, HostClock, StepClock

WINDOW = 5  # steps
_WARM_UP = 2  # steps after a start that say nothing about speeds: allocations, compilation
_PREFETCH_FACTOR = 2  # torch's default, for each worker


@dataclass(frozen=True)
class ShareDecision:
    """What was decided after step `step`: to divide batches from number `first` on by `samples`, or nothing new if
    `first` is None. `speeds` are the smoothed samples/s of the data ranks."""

    step: int
    first: int | None
    samples: tuple[int, ...]
    speeds: tuple[float, ...]


class AdaptiveShares:
    """`table` has the shares of each batch. `on_decision` is called with each new decision, on every rank."""

    def __init__(self, parallel: ParallelModel, rank: int, ranks: int) -> None:
        self._plan = parallel.plan
        self._sums = parallel.sums
        self._rank, self._ranks, self._data_rank = rank, ranks, parallel.position.data_rank
        self._device = parallel.device
        self._data_rank_of: list[int] = []  # by rank; empty until the first exchange
        self.on_decision: Callable[[ShareDecision], None] | None = None
        self._lead = 1
        self._start(self._plan.shares.samples or (1,) * self._plan.data_ranks, 0)

    def _start(self, samples: tuple[int, ...], step: int) -> None:
        """Begins before step `step` with these shares."""
        self.table = ShareTable(samples)
        self.samples = samples  # those of the last decision, which may begin later
        self._state = SpeedState()
        self._decided = step  # the step after which the last decision was made
        self._last_batch = step - 1  # the number of the last batch that a loop got
        self._batch = 0  # samples of a global batch
        self._pending: list[ShareDecision] = []
        self._steps_of_start = 0
        self.clock: StepClock = DeviceClock() if self._device.type == "cuda" else HostClock()

    # ---- batches

    def note_loading(self, loading: LoadingOptions) -> None:
        """Notes how far a loader reads ahead."""
        factor = loading.loader_options.get("prefetch_factor") or _PREFETCH_FACTOR
        # A stream holds one more batch back, to know whether it is the last one.
        self._lead = max(self._lead, loading.workers * factor + 2)

    def watch(self, batches: Iterator[Batch], loading: LoadingOptions, first: int) -> Iterator[Batch]:
        """Yields the batches, of which the first one has the number `first`, and notes which one was yielded last and
        how long each took to load."""
        self.note_loading(loading)
        with closing(batches):  # type: ignore[type-var]
            for number in count(first):
                began = time.perf_counter()
                batch = next(batches, None)
                if batch is None:
                    return
                self.clock.loaded(time.perf_counter() - began)
                self.note_batch(number)
                yield batch

    def note_batch(self, number: int) -> None:
        """Notes that a loop gets the batch with this number."""
        self._last_batch = max(self._last_batch, number)

    # ---- steps

    def marking(self, report: Callable[[str], None]) -> Callable[[str], None]:
        """Returns a function that calls `report` with what the rank is doing, and notes it."""

        def mark(activity: str) -> None:
            self.clock.mark(activity)
            report(activity)

        return mark

    def begin_step(self, global_samples: int | None) -> None:
        """Begins a step on a batch of so many samples over all ranks."""
        if global_samples is None:
            raise InputError(
                "plan.shares.adaptive is true, but this batch is none of session.batches(dataset) or"
                " session.prepare(loader), which divide batches among the ranks: loop over one of these, or set"
                " shares.adaptive to false"
            )
        self._batch = max(self._batch, global_samples)
        self.clock.begin()

    def end_step(self, step: int, samples: Sequence[int]) -> None:
        """Ends step number `step`, counted from 1, with this rank's numbers of samples by microbatch. All ranks call
        this together."""
        self._steps_of_start += 1
        self.clock.end(sum(samples), samples[0], counts=self._steps_of_start > _WARM_UP)
        self.finish_window(step)

    def finish_window(self, step: int) -> None:
        """Exchanges speeds and decides, if a window ends with step `step`."""
        self._pending = [decision for decision in self._pending if decision.first is None or decision.first >= step]
        if step % WINDOW or not self._batch:
            return
        shares = {tuple(share_sizes(self._batch, self.table.at(batch))) for batch in range(step - WINDOW, step)}
        in_effect = shares.pop() if len(shares) == 1 else None
        self._state = observe(self._state, self._exchange(self.clock.take_speed()), in_effect)
        if step <= self._decided:  # the decision of a run that is repeated
            return
        self._decided = step
        present = share_sizes(self._batch, self.samples)
        delay = -(-(self._lead + 1) // WINDOW)
        self._state, samples = decide(self._state, present, self._plan.microbatches, delay)
        first = None
        if samples is not None:
            first = self._last_batch + 1 + self._lead
            self.samples = samples
        decision = ShareDecision(step, first, self.samples, self._state.speeds)
        if self.on_decision is not None:
            self.on_decision(decision)
        if first is not None:
            self._add(decision)

    def _add(self, decision: ShareDecision) -> None:
        assert decision.first is not None
        self.table.add(decision.first, decision.samples)
        self._pending.append(decision)

    def _exchange(self, speed: float) -> list[float]:
        """Returns the speeds of all data ranks: that of the slowest of the ranks that have the same samples, or 0 if it
        is not known."""
        if not self._data_rank_of:
            self._data_rank_of = [int(value) for value in self._of_ranks(float(self._data_rank))]
        speeds: dict[int, float] = {}
        for data_rank, of_rank in zip(self._data_rank_of, self._of_ranks(speed), strict=True):
            speeds[data_rank] = min(speeds.get(data_rank, of_rank), of_rank)
        return [speeds[data_rank] for data_rank in sorted(speeds)]

    def _of_ranks(self, value: float) -> list[float]:
        """The values of all ranks: a sum in which each rank has a number of its own."""
        numbers = torch.zeros(self._ranks, dtype=torch.float64)
        numbers[self._rank] = value
        assert self._sums is not None, "several data ranks are several ranks"
        return [float(number) for number in self._sums.start(numbers.to(self._device))().tolist()]

    # ---- checkpoints

    def about(self, step: int) -> dict[str, Any]:
        """What a checkpoint after step `step` keeps."""
        return {
            "samples": list(self.table.at(step)),
            "changes": [[d.step, d.first, list(d.samples)] for d in self._pending if d.first and d.first > step],
            "decided": self._decided,
            "speeds": self._state.to_plain(),
        }

    def restore(self, step: int, about: dict[str, Any] | None) -> None:
        """Goes on after step `step` of a checkpoint. One of another number of data ranks, or without shares, says
        nothing about them."""
        plan = self._plan
        self._start(plan.shares.samples or (1,) * plan.data_ranks, step)
        if about is None or len(about["samples"]) != plan.data_ranks:
            return
        self._start(tuple(about["samples"]), step)
        self._state = SpeedState.from_plain(about["speeds"])
        self.repeat(ShareDecision(at, first, tuple(samples), ()) for at, first, samples in about["changes"])
        self._decided = max(self._decided, about["decided"])

    def repeat(self, decisions: Iterable[ShareDecision]) -> None:
        """Makes decisions again that were made after the checkpoint, in the order in which they were made. Is called
        before a loader begins."""
        known, self._pending = self._pending, []
        repeated = list(decisions)
        self.table = ShareTable(self.table.at(self._last_batch + 1), ROWS + len(known) + len(repeated))
        for decision in (*known, *repeated):
            self._decided = max(self._decided, decision.step)
            if decision.first is not None:
                self.samples = decision.samples
                self._add(decision)


def make_adaptive_shares(parallel: ParallelModel, rank: int, ranks: int) -> AdaptiveShares | None:
    """Returns the adaptive shares of a plan; None if it has none, or a single data rank."""
    plan = parallel.plan
    if not plan.shares.adaptive or plan.data_ranks == 1:
        return None
    return AdaptiveShares(parallel, rank, ranks)

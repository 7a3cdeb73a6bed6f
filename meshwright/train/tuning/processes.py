"""`StepMeasurer`: times steps of a job under plans, each rank in a process of its own, all at the same time. The
processes hold all memory and all compiled code of the measurements, and an error that ends one does not end the run.
They do not exchange anything (steps.py)."""

import multiprocessing
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import Any, Self

import torch

from meshwright.cluster.cluster import Cluster
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.tuning.job_batches import first_batches
from meshwright.train.tuning.steps import compiling_as_in, plan_of_rank, time_steps
from meshwright.train.tuning.variants import Timing
from meshwright.user.code import first_line

ENDED = "the measuring process has ended"


@dataclass(frozen=True)
class _Rank:
    """What a measuring process stands for: a job on this device with so many threads."""

    job: Job
    device: str
    number: int
    threads: int


class StepMeasurer:
    """Times steps of this job in a process for each rank, which the first measurement starts; use it as a context, at
    whose end the processes end. A rank's share of a batch is that of `plan`."""

    def __init__(self, job: Job, plan: Plan, cluster: Cluster, ranks: int | None = None) -> None:
        """`ranks` is the number of processes; by default that of the plan."""
        threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
        shares = plan.share_sizes(job.train.global_batch)[: ranks or plan.world_size]
        self._samples = [max(1, size) for size in shares]
        self._ranks = [_Rank(job, cluster.kind, number, threads) for number in range(len(shares))]
        self._running: list[tuple[BaseProcess, Connection]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        for rank in self._ranks:
            ours, theirs = context.Pipe()
            process = context.Process(target=_answer_requests, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()  # otherwise nobody would notice here that the process has ended
            self._running.append((process, ours))

    def _end(self) -> None:
        for process, _ in self._running:
            process.kill()
        for process, connection in self._running:
            process.join()
            connection.close()
        self._running = []

    def measure(self, plan: Plan, limit_s: float, finds_spread: bool = False) -> Sequence[Timing]:
        """Returns the timings of a plan by rank. If a process ends by itself, or is not ready within the limit, all of
        them are ended, and the next measurement starts others."""
        begin = time.perf_counter()
        if not self._running:
            self._start()
        timings: list[Timing] = []
        for (_, connection), samples in zip(self._running, self._samples, strict=True):
            with suppress(OSError):  # of a process that has ended; noticed below
                connection.send((plan, samples, finds_spread))
        for _, connection in self._running:
            try:
                left_s = max(0.0, limit_s - (time.perf_counter() - begin))
                timings.append(connection.recv() if connection.poll(left_s) else Timing(0.0))
            except (EOFError, OSError):  # for example, the system has killed it because it used too much memory
                timings.append(Timing(0.0, failure=ENDED))
        if any(timing.step_s is None and timing.failure in (None, ENDED) for timing in timings):
            self._end()
        seconds = time.perf_counter() - begin
        return [replace(timing, seconds=seconds) for timing in timings]


def _answer_requests(connection: Connection, rank: _Rank) -> None:
    """A measuring process: receives plans, and sends what was measured."""
    torch.set_num_threads(rank.threads)
    device = torch.device("cuda", rank.number) if rank.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    world = World(0, rank.number, 1, 1, 0, device, None)
    batches: list[Any] = []
    while True:
        plan, samples, finds_spread = connection.recv()
        try:
            connection.send(_measure(rank.job, plan, world, samples, batches, finds_spread))
        except Exception as error:  # whatever the job's code or the compiler raises: the plan cannot be used
            connection.send(Timing(0.0, failure=first_line(error)))


def _measure(job: Job, plan: Plan, world: World, samples: int, batches: list[Any], finds_spread: bool) -> Timing:
    from meshwright.train.job_session import build_session

    own_plan = plan_of_rank(plan)
    if own_plan is None:  # to choose a precision, one microbatch on an undivided model is enough
        own_plan, samples = Plan(numerics=plan.numerics, compute=plan.compute), max(1, samples // plan.microbatches)
    with compiling_as_in(plan):
        session = build_session(job, own_plan, world, lambda activity: None)
        batches += [] if batches else first_batches(job, session, samples)
        timing = Timing()
        time_steps(session, batches, finds_spread, timing)
        return timing

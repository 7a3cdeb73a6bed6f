"""`StepMeasurer`: measures training steps of a job under plans, on one rank, in a process of its own. The process holds
all memory and all compiled code of the measurements, and an error that ends it does not end the run."""

import multiprocessing
import time
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection
from statistics import median
from types import TracebackType
from typing import Any, Self

import torch

from meshwright.cluster.cluster import Cluster
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_loading
from meshwright.user_code import first_line

_WARM_UP_STEPS = 5  # CUDA graphs are captured in the fourth step
_LEAST_STEPS, _MOST_STEPS, _MEASURED_S = 3, 50, 0.5
_BATCHES = 4  # that the measured steps take in turn


@dataclass(frozen=True)
class MeasuredSteps:
    """The median seconds of a step, and the seconds until the steps ran at this speed: building the model, compiling it
    and warming up."""

    step_s: float
    ready_s: float


class StepMeasurer:
    """Starts the process in which steps of this job are measured; use it as a context, at whose end the process ends.
    The batch of the measured rank is one microbatch of `plan`. Communication is not measured."""

    def __init__(self, job: Job, plan: Plan, cluster: Cluster) -> None:
        threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
        samples = max(1, job.train.global_batch // plan.batch_parts)
        context = multiprocessing.get_context("spawn")
        self._connection, self._its_connection = context.Pipe()
        arguments = (self._its_connection, job, cluster.kind, samples, threads)
        self._process = context.Process(target=_answer_requests, args=arguments, daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._its_connection.close()  # otherwise nobody would notice here that the process has ended
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.join()

    def measure(self, plan: Plan, timeout_s: float) -> MeasuredSteps | str:
        """Returns the measured steps under the numerics and the compute of a plan, or why they cannot be measured."""
        try:
            self._connection.send(Plan(numerics=plan.numerics, compute=plan.compute))
            if self._connection.poll(timeout_s):
                answer: MeasuredSteps | str = self._connection.recv()
                return answer
        except (EOFError, OSError):  # for example, the system has killed it because it used too much memory
            return "the measuring process has ended"
        self._process.kill()  # it cannot be asked again
        self._process.join()
        return f"it was not measured within {timeout_s:.0f} s"


def _answer_requests(connection: Connection, job: Job, kind: str, samples: int, threads: int) -> None:
    """The measuring process: receives plans, and sends what was measured."""
    torch.set_num_threads(threads)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    world = World(0, 0, 1, 1, 0, device, None)
    batches: list[Any] = []
    while True:
        plan = connection.recv()
        try:
            connection.send(_measure(job, plan, world, samples, batches))
        except Exception as error:  # whatever the job's code or the compiler raises: the plan cannot be used
            connection.send(first_line(error))


def _measure(job: Job, plan: Plan, world: World, samples: int, batches: list[Any]) -> MeasuredSteps:
    from meshwright.train.job_session import build_session

    begin = time.perf_counter()
    session = build_session(job, plan, world, lambda activity: None)
    if not batches:
        # Without workers, which a process that ends with its parent may not start.
        loading = replace(build_loading(job, world.device), workers=0)
        batches += islice(session.batches(build_data(job)[0], None, samples, loading), _BATCHES)
    for number in range(_WARM_UP_STEPS):
        float(session.step(batches[number % len(batches)]))  # reading the loss waits for the device
    ready_s = time.perf_counter() - begin
    seconds: list[float] = []
    while len(seconds) < _LEAST_STEPS or (len(seconds) < _MOST_STEPS and sum(seconds) < _MEASURED_S):
        begin = time.perf_counter()
        float(session.step(batches[len(seconds) % len(batches)]))
        seconds.append(time.perf_counter() - begin)
    return MeasuredSteps(median(seconds), ready_s)

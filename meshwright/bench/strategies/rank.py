"""One process of a measurement. The launcher calls `main` with the folder of the measurement in `sys.argv`."""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.bench.strategies.exchanged_bytes import ExchangeCounter
from meshwright.bench.strategies.gpu_shares import gpu_time_shares
from meshwright.bench.strategies.loops import Step, plain_steps, session_steps
from meshwright.bench.strategies.request import MeasurementRequest, ProcessAnswer, job_file, plan_file
from meshwright.bench.strategies.time_samples import TimeSampler
from meshwright.job import Job, load_job, load_plan
from meshwright.plan import Plan
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World, world_without_group
from meshwright.train.output.folder import RunFolder
from meshwright.train.output.peak_memory import peak_memory_bytes
from meshwright.train.servers.rank import train_server, train_worker


def main() -> None:
    folder = Path(sys.argv[1])
    request = MeasurementRequest.load(folder)
    job, plan = load_job(job_file(folder)), load_plan(plan_file(folder))
    if request.loop == "servers":
        _run_with_servers(job, plan, folder, request)
        return

    def measure(world: World, heartbeat: Heartbeat) -> None:
        count = request.warm_up_steps + request.steps + request.sampled_steps
        if request.loop == "session":
            step = session_steps(job, plan, world, count)
        else:
            step = plain_steps(job, plan, world.device, request.parts, count)
        _measure(step, request, world.device, plan).save(folder, world.rank)

    run_rank(measure, request.device, job.train.timeout_s)


def _measure(step: Step, request: MeasurementRequest, device: torch.device, plan: Plan) -> ProcessAnswer:
    for _ in range(request.warm_up_steps):
        float(step())  # reading the loss waits for the device
    if dist.is_initialized():
        dist.barrier()
    counter, sampler = ExchangeCounter(), TimeSampler()
    records_timed = request.records_timed and device.type == "cpu" and dist.is_initialized()
    begin = time.perf_counter()
    with sampler if records_timed else nullcontext():
        for _ in range(request.steps):
            loss = step()
        last_loss = float(loss)
    step_s = (time.perf_counter() - begin) / request.steps
    exchanged = None if device.type == "cuda" and dist.is_initialized() else counter.bytes()
    peak = peak_memory_bytes(device)
    shares = None
    if request.sampled_steps and device.type == "cuda":
        shares = gpu_time_shares(step, request.sampled_steps, is_pipeline=plan.axes.pipeline > 1)
    elif request.sampled_steps and dist.is_initialized():
        with sampler:
            for _ in range(request.sampled_steps):
                float(step())
    per_step = None if exchanged is None else exchanged / request.steps
    return ProcessAnswer(step_s, last_loss, per_step, peak, sampler.samples, shares)


class _ObservedHeartbeat(Heartbeat):
    """A rank's heartbeat that calls `after_step` after every step."""

    def __init__(self, heartbeat: Heartbeat, after_step: Callable[[], None]) -> None:
        super().__init__(0)
        self.folder = heartbeat.folder
        self._heartbeat = heartbeat
        self._after_step = after_step

    def update(self, step: int, activity: str) -> None:
        self._heartbeat.update(step, activity)

    def finish_step(self) -> None:
        self._heartbeat.finish_step()
        self._after_step()


def _run_with_servers(job: Job, plan: Plan, folder: Path, request: MeasurementRequest) -> None:
    """Runs this process as a worker or a parameter server. Workers count and record from the first step on; the time
    and the loss of a step are those that the first server writes to the run's result."""

    def measure(world: World, heartbeat: Heartbeat) -> None:
        if world.rank >= plan.world_size:
            train_server(job, plan, RunFolder(folder), world, heartbeat, None)
            return
        counter, steps = ExchangeCounter(counts_received=True), 0
        exchanged: list[float] = []  # per step, so far

        def after_step() -> None:
            nonlocal steps
            steps += 1
            if steps == request.warm_up_steps:
                counter.start()
            # After the last step the servers may have closed their connections, whose bytes are no longer counted.
            if steps > request.warm_up_steps and (sent := counter.bytes() or 0.0) > 0:
                exchanged.append(sent / (steps - request.warm_up_steps))

        with TimeSampler() as sampler:
            train_worker(job, plan, RunFolder(folder), world, _ObservedHeartbeat(heartbeat, after_step))
        samples = sampler.samples[len(sampler.samples) // 4 :]  # without most of the set-up
        per_step = exchanged[0] if exchanged else None
        ProcessAnswer(None, None, per_step, peak_memory_bytes(world.device), samples).save(folder, world.rank)

    def join(device: str, timeout_s: float) -> World:
        world = world_without_group("cpu")  # servers compute on the CPU
        return world_without_group(device) if world.rank < plan.world_size else world

    run_rank(measure, request.device, job.train.timeout_s, join)


if __name__ == "__main__":
    main()

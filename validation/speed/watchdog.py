"""What the heartbeat and the watchdog of a rank cost a step: `python -m validation.speed.watchdog [mnist|gpt]`.

Two CPU ranks train the job in one run. In turns of some steps, they write heartbeats to files and have a watchdog, as
under `meshwright train`, and do neither; which comes first changes from round to round. Other programs change this
ratio, so CPU time is printed, too: that of the calls that a rank makes in a step, and that of the watchdog's thread."""

import argparse
import tempfile
import threading
import time
from pathlib import Path
from statistics import median

from torch import Tensor

import meshwright as mw
from meshwright.parallel.exchange_names import ModelExchanges
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.stall.watchdog import make_watchdog
from meshwright.processes.world import join
from meshwright.train.build import build_data
from meshwright.train.job_session import build_session

_WARM_UP_STEPS, _TIMED_STEPS = 10, 20_000
_ACTIVITIES = ("data", "prepare", "forward", "backward", "optimizer")  # of a step, in this order
_SETTINGS = {
    "mnist": ["data.synthetic=true"],
    "gpt": ["data.synthetic=true", "model.layers=4", "model.hidden=256", "model.heads=4", "train.global_batch=16"],
}


class _Switch:
    """A heartbeat that can be turned off."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self.heartbeat = heartbeat
        self.is_on = False
        self.steps = 0

    def report(self, activity: str) -> None:
        if self.is_on:
            self.heartbeat.update(self.steps, activity)

    def finish_step(self) -> None:
        self.steps += 1
        if self.is_on:
            self.heartbeat.finish_step()


def measure(job_name: str, folder: str, rounds: int, steps: int) -> tuple[list[float], list[float], list[float]]:
    """Runs as a rank. Returns the seconds of a step of each round, without and with heartbeat and watchdog, and the CPU
    seconds of the watchdog's thread in a step."""
    world = join("cpu", 300)
    job = mw.load_job(f"jobs/{job_name}.yaml", _SETTINGS[job_name])
    switch = _Switch(Heartbeat.in_folder(Path(folder), world.rank, 0))
    session = build_session(job, Plan(axes=Axes(replicate=world.size)), world, switch.report)
    switch.heartbeat.exchanges = ModelExchanges(session.parallel)
    batch = next(iter(session.batches(build_data(job)[0], 1, job.train.global_batch)))

    def run(count: int) -> float:
        begin = time.perf_counter()
        loss: Tensor | None = None
        for _ in range(count):
            switch.report("data")
            loss = session.step(batch)
            switch.finish_step()
        assert loss is not None
        float(loss)
        return (time.perf_counter() - begin) / count

    run(_WARM_UP_STEPS)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    thread_s: list[float] = []
    for number in range(rounds):
        for is_on in (False, True) if number % 2 else (True, False):
            switch.is_on = is_on
            watchdog = None
            if is_on:
                watchdog = make_watchdog(world, world.store, switch.heartbeat, 300, lambda _: None, lambda _: None)
                assert watchdog is not None
            seconds[is_on].append(run(steps))
            if watchdog is not None:
                thread_s.append(_watchdog_cpu_s() / steps)
                watchdog.close()
    return seconds[False], seconds[True], thread_s


def _watchdog_cpu_s() -> float:
    """The CPU seconds that the watchdog's thread has taken."""
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "meshwright watchdog"]
    assert thread.ident is not None
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def heartbeat_s() -> float:
    """The CPU seconds that the heartbeat's calls take of a step."""
    with tempfile.TemporaryDirectory() as folder:
        heartbeat = Heartbeat.in_folder(Path(folder), 0, 0)
        begin = time.thread_time()
        for step in range(_TIMED_STEPS):
            for activity in _ACTIVITIES:
                heartbeat.update(step, activity)
            heartbeat.finish_step()
        return (time.thread_time() - begin) / _TIMED_STEPS


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", nargs="?", default="mnist", choices=sorted(_SETTINGS))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=20, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        without, with_both, thread_s = mw.launch(
            measure, options.job, folder, options.rounds, options.steps, ranks=2, device="cpu"
        )
    ratios = [both / none for none, both in zip(without, with_both, strict=True)]
    quarters = sorted(ratios)[len(ratios) // 4], sorted(ratios)[-1 - len(ratios) // 4]
    step_s = median(without)
    print(
        f"{options.job}: {step_s * 1e3:.1f} ms a step without; with heartbeat and watchdog {median(ratios) - 1:+.2%}"
        f" (median of {len(ratios)} rounds of {options.steps} steps, half of them from {quarters[0] - 1:+.2%} to"
        f" {quarters[1] - 1:+.2%})"
    )
    call_s = median(heartbeat_s() for _ in range(5))
    cpu_s = call_s + median(thread_s)
    print(
        f"CPU time in a step: the heartbeat's calls {call_s * 1e6:.1f} µs, the watchdog's thread"
        f" {median(thread_s) * 1e6:.1f} µs (from {min(thread_s) * 1e6:.1f} to {max(thread_s) * 1e6:.1f}),"
        f" {cpu_s / step_s:.3%} of the step"
    )


if __name__ == "__main__":
    main()

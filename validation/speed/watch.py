"""What `meshwright watch`, and the recording that its page is made from, cost a training run:
`python -m validation.speed.watch [mnist|gpt]`.

One run of two CPU ranks goes on all the time. In turns of some seconds, `meshwright watch` serves its page, which is
asked for every three seconds as a browser does, and does not. The seconds of a step come from the file of rank 0 in the
folder `times`; a window that lies in two turns is left out. A ratio compares a turn with `watch` with the turns without
before and after it. The browser is left out: where it draws the page on the machine that trains, it costs more. Other
programs change the ratio, so the processor time of the server is printed, too: its share of all cores is the most that
it can take from a step that keeps all of them busy.

Then the recording alone is timed: the calls that a rank makes in a step, on one thread, without a model.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch

from meshwright.cluster.cores import usable_cores
from meshwright.processes.world import World
from meshwright.train.output.activity_times import SMALLEST_WINDOW, ActivityTimes, times_file
from meshwright.train.output.folder import RunFolder

LIVE_S = 3.0  # as in report/templates/live.js
_RECORDED_STEPS = 20_000
_SETTINGS = {
    "data.synthetic": "true",
    "train.steps": 1_000_000,
    "train.epochs": 1_000_000,
    "plan.axes.replicate": 2,
    "checkpoint.every_steps": 1_000_000,
    "log.eval_every_steps": 1_000_000,
    "log.tensorboard": "false",
}
# What a rank does in a step, in this order.
_ACTIVITIES = ("data", "prepare", "forward", "backward", "optimizer", "log")


@contextmanager
def training(job: str, output: Path) -> Iterator[Path]:
    """Trains in two ranks until the block ends; the value is the folder of the run, of which some steps are done."""
    settings = {**_SETTINGS, "output": output}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "meshwright", "train", job, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        while not (folders := [folder for folder in output.glob("*-0001") if len(windows(folder)) > 1]):
            if process.poll() is not None:
                assert process.stderr is not None
                sys.exit(process.stderr.read())
            time.sleep(0.5)
        yield folders[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


@contextmanager
def watching(folder: Path) -> Iterator[tuple[str, int]]:
    """Serves the page of a run until the block ends; the value is its address, and the process that serves it."""
    command = [sys.executable, "-m", "meshwright", "watch", str(folder), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["url"], process.pid
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def ask_for(url: str, seconds: float) -> None:
    """Asks for the page, and then for its body every three seconds."""
    end = time.monotonic() + seconds
    address = url
    while time.monotonic() < end:
        with urllib.request.urlopen(address) as answer:
            answer.read()
        address = f"{url}body"
        time.sleep(max(0.0, min(LIVE_S, end - time.monotonic())))


def cpu_s(pid: int) -> float:
    """The processor seconds that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # user and system


def windows(folder: Path) -> list[tuple[float, int]]:
    """The end of each recorded window of steps, and the number of its steps."""
    file = times_file(RunFolder(folder).times, 0)
    if not file.exists():
        return []
    lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
    return [(line["time"], line["steps"]) for line in lines if "steps" in line]


def step_s(measured: Sequence[tuple[float, int]], begin: float, end: float) -> float:
    """The mean seconds of a step in the windows that lie between two moments."""
    inside = [
        (later - earlier, steps)
        for (earlier, _), (later, steps) in pairwise(measured)
        if begin <= earlier < later <= end
    ]
    if not inside:
        sys.exit(f"no window of {SMALLEST_WINDOW} steps lies in a turn of {end - begin:.0f} s: raise --seconds")
    return sum(seconds for seconds, _ in inside) / sum(steps for _, steps in inside)


def recording_s() -> float:
    """The CPU seconds that recording takes of a step."""
    world = World(0, 0, 1, 1, 0, torch.device("cpu"), None)
    with tempfile.TemporaryDirectory() as folder:
        times = ActivityTimes(Path(folder), world, 0, SMALLEST_WINDOW)
        begin = time.thread_time()
        for step in range(_RECORDED_STEPS):
            for activity in _ACTIVITIES:
                times.enter(step, activity)
            times.finish_step()
        seconds = time.thread_time() - begin
        times.close()
    return seconds / _RECORDED_STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("job", nargs="?", default="mnist", choices=("mnist", "gpt"))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=15.0, help="of a turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, training(options.job, Path(folder)) as run:
        turns: list[tuple[float, float]] = []
        shares: list[float] = []
        for _ in range(options.rounds):
            turns.append(_idle_turn(options.seconds))
            with watching(run) as (url, server):
                begin, cpu_before_s = time.time(), cpu_s(server)
                ask_for(url, options.seconds)
                turns.append((begin, time.time()))
                shares.append((cpu_s(server) - cpu_before_s) / (turns[-1][1] - begin))
        turns.append(_idle_turn(options.seconds))
        measured = windows(run)
    steps = [step_s(measured, begin, end) for begin, end in turns]
    ratios = [steps[place] / mean((steps[place - 1], steps[place + 1])) for place in range(1, len(steps), 2)]
    typical = median(steps[::2])
    print(
        f"{options.job}: {typical * 1e3:.1f} ms a step without watch; with it {median(ratios) - 1:+.2%}"
        f" (from {min(ratios) - 1:+.2%} to {max(ratios) - 1:+.2%}, {options.rounds} rounds)"
    )
    cores = usable_cores()
    print(
        f"the server takes {median(shares):.2%} of one core (from {min(shares):.2%} to {max(shares):.2%}),"
        f" {median(shares) / cores:.2%} of {cores} cores"
    )
    unwatched = [later / earlier - 1 for earlier, later in pairwise(steps[::2])]
    print(f"turns without watch differ from the next one by up to {max(map(abs, unwatched)):.2%}")
    recorded = median(recording_s() for _ in range(5))
    print(f"recording takes {recorded * 1e6:.1f} µs of a step, {recorded / typical:.3%} of it")


def _idle_turn(seconds: float) -> tuple[float, float]:
    begin = time.time()
    time.sleep(seconds)
    return begin, time.time()


if __name__ == "__main__":
    main()

"""Times a function on a device: the median of repeated runs, after runs that warm up."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from statistics import median

import torch

from meshwright.calibrate.torch_private import keep_gpu_busy

ROUNDS = 5
_CYCLES_PER_S = 2e9  # an upper limit for the clock of a GPU; `keep_gpu_busy` takes its waiting time in cycles
_LONGEST_WAIT_S = 0.012
_MOST_ENQUEUED_RUNS = 8  # in each round


def seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Returns the seconds of one run, measured over about `budget_s` seconds of runs. Work that a GPU does
    asynchronously is included."""
    run_s = elapsed(run, device, 1)
    if run_s < budget_s:  # the first run includes one-time initialization
        run_s = elapsed(run, device, 1)
    runs = max(1, min(1000, int(budget_s / ROUNDS / run_s)))
    rounds = ROUNDS if run_s < budget_s else 1
    return median(elapsed(run, device, runs) / runs for _ in range(rounds))


def device_seconds(variants: Sequence[Callable[[], object]], device: torch.device, budget_s: float = 0.1) -> float:
    """Returns the seconds that the device itself is busy with one run. `variants` are functions that do the same work
    on different inputs; they run in turn. A GPU first waits until several runs are enqueued, therefore the host's
    launch overhead is not part of the result."""
    in_turn = cycle(variants)
    elapsed(next(in_turn), device, 1)  # includes one-time initialization
    run_s = elapsed(next(in_turn), device, 1)
    if device.type != "cuda":
        rounds = min(ROUNDS, int(budget_s / run_s))
        runs = max(1, min(200, int(budget_s / ROUNDS / run_s)))
        return median([run_s, *(elapsed(lambda: next(in_turn)(), device, runs) / runs for _ in range(rounds))])
    for run in islice(in_turn, len(variants)):
        run_s = min(run_s, elapsed(run, device, 1))
    rounds = max(2, min(ROUNDS, int(budget_s / run_s)))
    runs = max(1, min(_MOST_ENQUEUED_RUNS, int(budget_s / rounds / run_s)))
    return _enqueued_seconds(lambda: next(in_turn)(), device, rounds, runs, run_s)


def _enqueued_seconds(run: Callable[[], object], device: torch.device, rounds: int, runs: int, run_s: float) -> float:
    """Returns the GPU seconds of one run: the median over `rounds` of `runs` runs each. All rounds are enqueued behind
    a kernel that waits about as long as they take (at most `_LONGEST_WAIT_S`), so that the GPU need not wait for the
    host. `run_s` is an estimate of one run's seconds."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    _wait(device)
    keep_gpu_busy(int(min(_LONGEST_WAIT_S, rounds * runs * run_s + 1e-3) * _CYCLES_PER_S))
    events[0].record()
    for event in events[1:]:
        for _ in range(runs):
            run()
        event.record()
    _wait(device)
    milliseconds = [begin.elapsed_time(end) for begin, end in pairwise(events)]
    return float(median(milliseconds)) / 1e3 / runs


def elapsed(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Returns the total seconds of this number of consecutive runs, until the device has finished the last run."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

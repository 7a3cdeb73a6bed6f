"""How long something takes on a device: the median of repeated runs, after runs that warm up."""

import time
from collections.abc import Callable, Sequence
from itertools import cycle, islice, pairwise
from statistics import median

import torch

ROUNDS = 5
_CYCLES_PER_S = 2e9  # of a GPU, at most: how long it is told to wait is counted in these
_LONGEST_LEAD_S = 0.012
_ENQUEUED = 8  # of each round


def seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Seconds of one run, from about `budget_s` of them; work that a GPU does later is waited for."""
    once = elapsed(run, device, 1)
    if once < budget_s:  # the first run also pays for what is set up once
        once = elapsed(run, device, 1)
    runs = max(1, min(1000, int(budget_s / ROUNDS / once)))
    rounds = ROUNDS if once < budget_s else 1
    return median(elapsed(run, device, runs) / runs for _ in range(rounds))


def device_seconds(turns: Sequence[Callable[[], object]], device: torch.device, budget_s: float = 0.1) -> float:
    """Seconds that the device itself is busy with one run, where several that are alike take turns. A GPU is kept
    waiting until it has a row of them to do, so that what its host takes to start each does not count."""
    in_turn = cycle(turns)
    elapsed(next(in_turn), device, 1)  # pays for what is set up once
    once = elapsed(next(in_turn), device, 1)
    if device.type != "cuda":
        rounds = min(ROUNDS, int(budget_s / once))
        runs = max(1, min(200, int(budget_s / ROUNDS / once)))
        return median([once, *(elapsed(lambda: next(in_turn)(), device, runs) / runs for _ in range(rounds))])
    for run in islice(in_turn, len(turns)):
        once = min(once, elapsed(run, device, 1))
    rounds = max(2, min(ROUNDS, int(budget_s / once)))
    runs = max(1, min(_ENQUEUED, int(budget_s / rounds / once)))
    return _behind(lambda: next(in_turn)(), device, rounds, runs, once)


def _behind(run: Callable[[], object], device: torch.device, rounds: int, runs: int, once: float) -> float:
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    _wait(device)
    torch.cuda._sleep(int(min(_LONGEST_LEAD_S, rounds * runs * once + 1e-3) * _CYCLES_PER_S))
    marks[0].record()
    for mark in marks[1:]:
        for _ in range(runs):
            run()
        mark.record()
    _wait(device)
    taken = [before.elapsed_time(after) for before, after in pairwise(marks)]
    return float(median(taken)) / 1e3 / runs


def elapsed(run: Callable[[], object], device: torch.device, runs: int) -> float:
    """Seconds of so many runs one after another, until the last one's work is done."""
    _wait(device)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

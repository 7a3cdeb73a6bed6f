"""How long something takes on a device: the median of repeated runs, after runs that warm up."""

import time
from collections.abc import Callable
from statistics import median

import torch

ROUNDS = 5
_LEAD_CYCLES = 20_000_000  # a GPU that first waits about 10 ms is behind its host for as long


def seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Seconds of one run, from about `budget_s` of them; work that a GPU does later is waited for."""
    once = elapsed(run, device, 1)
    if once < budget_s:  # the first run also pays for what is set up once
        once = elapsed(run, device, 1)
    runs = max(1, min(1000, int(budget_s / ROUNDS / once)))
    rounds = ROUNDS if once < budget_s else 1
    return median(elapsed(run, device, runs) / runs for _ in range(rounds))


def device_seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Seconds that the device itself is busy with one run. A GPU is kept waiting until it has a row of them to do, so
    that what its host takes to start each does not count."""
    if device.type != "cuda":
        return seconds(run, device, budget_s)
    once = min(elapsed(run, device, 1) for _ in range(3))
    runs = max(1, min(20, int(budget_s / ROUNDS / once)))
    return median(_behind(run, device, runs) / runs for _ in range(ROUNDS))


def _behind(run: Callable[[], object], device: torch.device, runs: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    _wait(device)
    torch.cuda._sleep(_LEAD_CYCLES)
    begin.record()
    for _ in range(runs):
        run()
    end.record()
    _wait(device)
    return float(begin.elapsed_time(end)) / 1e3


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

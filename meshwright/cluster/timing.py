"""How long something takes on a device: the median of repeated runs, after runs that warm up."""

import time
from collections.abc import Callable
from statistics import median

import torch

ROUNDS = 5


def seconds(run: Callable[[], object], device: torch.device, budget_s: float = 0.1) -> float:
    """Seconds of one run, from about `budget_s` of them; work that a GPU does later is waited for."""
    once = elapsed(run, device, 1)
    if once < budget_s:  # the first run also pays for what is set up once
        once = elapsed(run, device, 1)
    runs = max(1, min(1000, int(budget_s / ROUNDS / once)))
    rounds = ROUNDS if once < budget_s else 1
    return median(elapsed(run, device, runs) / runs for _ in range(rounds))


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

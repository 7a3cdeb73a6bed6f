"""Time that ranks take together: each call is made by all of them, and all are told the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from time import perf_counter, process_time

import torch
import torch.distributed as dist

ROUNDS = 7


@dataclass(frozen=True)
class Taken:
    """By one run: `wall_s` on the slowest rank, `core_s` of a rank's cores on average."""

    wall_s: float
    core_s: float


def slowest(group: dist.ProcessGroup, seconds: float) -> float:
    """Of all ranks."""
    found = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return float(found.item())


def timed(group: dist.ProcessGroup, run: Callable[[], object], repeats: int, rounds: int = ROUNDS) -> Taken:
    """The median of some rounds, which ranks begin together."""
    run()
    walls, cores = [], []
    for _ in range(rounds):
        wall_s, core_s = _once(group, run, repeats)
        walls.append(wall_s)
        cores.append(core_s)
    found = torch.tensor([median(cores)], dtype=torch.float64)
    dist.all_reduce(found, group=group)
    return Taken(median(walls), float(found.item()) / group.size())


def alternating(
    ways: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, rounds: int, budget_s: float
) -> dict[str, list[float]]:
    """Seconds of every round, on the rank that was slowest, each way for about `budget_s`. A round runs every way, so
    that a machine that slows down slows all of them."""
    repeats = {}
    for name, run in ways.items():
        run()  # opens memory, remembers programs
        repeats[name] = max(1, min(1000, int(budget_s / _once(group, run, 1)[0])))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, run in ways.items():
            found[name].append(_once(group, run, repeats[name])[0])
    return found


def beside(
    reference: Callable[[], object],
    ways: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    rounds: int,
    budget_s: float,
) -> dict[str, list[tuple[float, float]]]:
    """Seconds of every way with those of `reference` right before or right after it, by turns: what a machine does to
    both, their difference does not show."""
    reference()
    repeats = {}
    for name, run in ways.items():
        run()
        repeats[name] = max(1, min(1000, int(budget_s / _once(group, run, 1)[0])))
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, run in ways.items():
            pair = [run, reference] if number % 2 else [reference, run]
            taken = [_once(group, one, repeats[name])[0] for one in pair]
            found[name].append((taken[0], taken[1]) if number % 2 else (taken[1], taken[0]))
    return found


def _once(group: dist.ProcessGroup, run: Callable[[], object], repeats: int) -> tuple[float, float]:
    dist.barrier(group)
    run()  # ranks leave a barrier one after the other
    begun, busy = perf_counter(), process_time()
    for _ in range(repeats):
        run()
    core_s = (process_time() - busy) / repeats
    return slowest(group, (perf_counter() - begun) / repeats), core_s

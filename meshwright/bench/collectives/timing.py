"""Time that ranks take together: each call is made by all of them, and all are told the same.

A virtual machine's cores may be given to others for a while, and then ranks wait for the one whose core is gone. The
kernel counts that time; rounds that had much of it are made again, up to as many as were asked for, and those that had
least are kept (`undisturbed`). Where two ways are run right behind each other (`beside`), both have it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import sysconf
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import TypeVar

import torch
import torch.distributed as dist

ROUNDS = 7
MOST_STOLEN = 0.05  # of one core, in a round that counts at once

T = TypeVar("T")


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
    taken = undisturbed(group, lambda: _once(group, run, repeats), rounds)
    found = torch.tensor([median(core_s for _, core_s in taken)], dtype=torch.float64)
    dist.all_reduce(found, group=group)
    return Taken(median(wall_s for wall_s, _ in taken), float(found.item()) / group.size())


def undisturbed(group: dist.ProcessGroup, run: Callable[[], T], rounds: int) -> list[T]:
    """What so many rounds found, in their order."""
    found: list[tuple[float, int, T]] = []
    while len(found) < 2 * rounds:
        began, before = perf_counter(), stolen_s()
        one = run()
        lost = slowest(group, (stolen_s() - before) / (perf_counter() - began))
        found.append((lost, len(found), one))
        if sum(lost <= MOST_STOLEN for lost, *_ in found) >= rounds:
            break
    kept = sorted(found, key=lambda told: told[:2])[:rounds]
    return [one for _, _, one in sorted(kept, key=lambda told: told[1])]


def stolen_s(file: Path = Path("/proc/stat")) -> float:
    """Seconds of this machine's cores that its host has given to others since it started; 0 where nobody counts."""
    try:
        counts = file.read_text().split("\n", 1)[0].split()
        return int(counts[8]) / sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def alternating(
    ways: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, rounds: int, budget_s: float
) -> dict[str, list[float]]:
    """Seconds of every round, on the rank that was slowest, each way for about `budget_s`. A round runs every way, so
    that a machine that slows down slows all of them."""
    repeats = {}
    for name, run in ways.items():
        run()  # opens memory, remembers programs
        repeats[name] = max(1, min(1000, int(budget_s / _once(group, run, 1)[0])))

    def of_each() -> dict[str, float]:
        return {name: _once(group, run, repeats[name])[0] for name, run in ways.items()}

    found = undisturbed(group, of_each, rounds)
    return {name: [one[name] for one in found] for name in ways}


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
    """The median of the repeats: a machine that takes a rank's core away for a while makes few of them long."""
    dist.barrier(group)
    run()  # ranks leave a barrier one after the other
    walls = []
    busy, ended = process_time(), perf_counter()
    for _ in range(repeats):
        run()
        begun, ended = ended, perf_counter()
        walls.append(ended - begun)
    core_s = (process_time() - busy) / repeats
    return slowest(group, median(walls)), core_s

"""The time that ranks take together. All ranks call these functions together, and get the same result.

The host of a virtual machine may give its cores to others for a while, and then all ranks wait for the one without a
core. The kernel counts that time. Rounds with much of it are repeated, up to twice as many rounds as requested, and
those with the least are kept (`undisturbed_rounds`). Two functions that are timed directly after each other
(`time_against_reference`) are disturbed alike.
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
MOST_STOLEN = 0.05  # cores; a round with less counts as undisturbed

T = TypeVar("T")


@dataclass(frozen=True)
class RunTime:
    """The time of one run: `wall_s` on the slowest rank, and `core_s`, the CPU time of a rank on average."""

    wall_s: float
    core_s: float


def slowest_rank(group: dist.ProcessGroup, seconds: float) -> float:
    """The largest value of all ranks."""
    maximum = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return float(maximum.item())


def time_run(group: dist.ProcessGroup, run: Callable[[], object], repeats: int, rounds: int = ROUNDS) -> RunTime:
    """The median of several rounds, which all ranks begin together."""
    run()
    times = undisturbed_rounds(group, lambda: _time_repeats(group, run, repeats), rounds)
    core_s = torch.tensor([median(core_s for _, core_s in times)], dtype=torch.float64)
    dist.all_reduce(core_s, group=group)
    return RunTime(median(wall_s for wall_s, _ in times), float(core_s.item()) / group.size())


def undisturbed_rounds(group: dist.ProcessGroup, run: Callable[[], T], rounds: int) -> list[T]:
    """The results of so many rounds, in their order: those during which the fewest cores were taken away."""
    results: list[tuple[float, int, T]] = []  # stolen cores, number of the round, result
    while len(results) < 2 * rounds:
        begin, stolen_before_s = perf_counter(), stolen_s()
        result = run()
        stolen_cores = slowest_rank(group, (stolen_s() - stolen_before_s) / (perf_counter() - begin))
        results.append((stolen_cores, len(results), result))
        if sum(cores <= MOST_STOLEN for cores, *_ in results) >= rounds:
            break
    least_disturbed = sorted(results, key=lambda entry: entry[:2])[:rounds]
    return [result for _, _, result in sorted(least_disturbed, key=lambda entry: entry[1])]


def stolen_s(file: Path = Path("/proc/stat")) -> float:
    """The core seconds that the host of this virtual machine has given to others since its start; 0 where the kernel
    does not count them."""
    try:
        counts = file.read_text().split("\n", 1)[0].split()
        return int(counts[8]) / sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def time_alternating(
    functions: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, rounds: int, budget_s: float
) -> dict[str, list[float]]:
    """The seconds of every round on the slowest rank, by function. A round runs each function for about `budget_s`, so
    that a machine that slows down slows all of them."""
    repeats = {}
    for name, run in functions.items():
        run()  # the first call opens shared memory and builds programs
        repeats[name] = _repeats(group, run, budget_s)

    def time_round() -> dict[str, float]:
        return {name: _time_repeats(group, run, repeats[name])[0] for name, run in functions.items()}

    results = undisturbed_rounds(group, time_round, rounds)
    return {name: [result[name] for result in results] for name in functions}


def _repeats(group: dist.ProcessGroup, run: Callable[[], object], budget_s: float) -> int:
    """How often a function runs in about `budget_s`."""
    return max(1, min(1000, int(budget_s / _time_repeats(group, run, 1)[0])))


def time_against_reference(
    reference: Callable[[], object],
    functions: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    rounds: int,
    budget_s: float,
) -> dict[str, list[tuple[float, float]]]:
    """The seconds of every round by function, as pairs (function, reference). The reference runs directly before the
    function in one round and directly after it in the next, so that disturbances of the machine do not show in their
    difference."""
    reference()
    repeats = {}
    for name, run in functions.items():
        run()
        repeats[name] = _repeats(group, run, budget_s)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in functions}
    for number in range(rounds):
        for name, run in functions.items():
            order = [run, reference] if number % 2 else [reference, run]
            times = [_time_repeats(group, function, repeats[name])[0] for function in order]
            pairs[name].append((times[0], times[1]) if number % 2 else (times[1], times[0]))
    return pairs


def _time_repeats(group: dist.ProcessGroup, run: Callable[[], object], repeats: int) -> tuple[float, float]:
    """The seconds of a run on the slowest rank, and its CPU seconds on this one. The median of the repeats, because a
    machine that takes a rank's core away makes only a few of them long."""
    dist.barrier(group)
    run()  # ranks leave a barrier one after the other
    wall_times = []
    cpu_begin, end = process_time(), perf_counter()
    for _ in range(repeats):
        run()
        begin, end = end, perf_counter()
        wall_times.append(end - begin)
    core_s = (process_time() - cpu_begin) / repeats
    return slowest_rank(group, median(wall_times)), core_s

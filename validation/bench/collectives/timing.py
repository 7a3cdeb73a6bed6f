"""Measures how long a function takes that all ranks run together. All ranks call the `time_` functions together, and
get the same result.

The host of a virtual machine may give its cores to other machines for a while, and then all ranks wait for the rank
without a core. The kernel counts this stolen time. Rounds with much stolen time are repeated, up to twice as many
rounds as requested, and the rounds with the least stolen time are kept (`undisturbed_rounds`). Two functions that are
timed directly after each other (`time_against_reference`) are disturbed alike.
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
    """The time of one run: `wall_s` is the wall time on the slowest rank, `core_s` the CPU time of a rank, averaged
    over ranks."""

    wall_s: float
    core_s: float


def slowest_rank(group: dist.ProcessGroup, seconds: float) -> float:
    """Returns the largest value of `seconds` over all ranks."""
    maximum = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(maximum, dist.ReduceOp.MAX, group=group)
    return float(maximum.item())


def time_run(group: dist.ProcessGroup, run: Callable[[], object], repeats: int, rounds: int = ROUNDS) -> RunTime:
    """Returns the time of one run: the median over several rounds of `repeats` runs, which all ranks begin together."""
    run()
    times = undisturbed_rounds(group, lambda: _time_repeats(group, run, repeats), rounds)
    core_s = torch.tensor([median(core_s for _, core_s in times)], dtype=torch.float64)
    dist.all_reduce(core_s, group=group)
    return RunTime(median(wall_s for wall_s, _ in times), float(core_s.item()) / group.size())


def undisturbed_rounds(group: dist.ProcessGroup, run: Callable[[], T], rounds: int) -> list[T]:
    """Calls `run` once per round, and returns the results of the `rounds` rounds with the least stolen time, in the
    order in which they ran."""
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
    """Returns the core seconds that the host of this virtual machine has given to other machines since the start; 0 if
    the kernel does not count them."""
    try:
        counts = file.read_text().split("\n", 1)[0].split()
        return int(counts[8]) / sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def time_alternating(
    functions: Mapping[str, Callable[[], object]], group: dist.ProcessGroup, rounds: int, budget_s: float
) -> dict[str, list[float]]:
    """Returns the seconds of one call on the slowest rank in every round, by function. A round runs each function for
    about `budget_s`, so that a machine that slows down slows all of them."""
    repeats = {}
    for name, run in functions.items():
        run()  # the first call opens shared memory and builds programs
        repeats[name] = _repeats(group, run, budget_s)

    def time_round() -> dict[str, float]:
        return {name: _time_repeats(group, run, repeats[name])[0] for name, run in functions.items()}

    results = undisturbed_rounds(group, time_round, rounds)
    return {name: [result[name] for result in results] for name in functions}


def _repeats(group: dist.ProcessGroup, run: Callable[[], object], budget_s: float) -> int:
    """Returns how often a function can run in about `budget_s`."""
    return max(1, min(1000, int(budget_s / _time_repeats(group, run, 1)[0])))


def time_against_reference(
    reference: Callable[[], object],
    functions: Mapping[str, Callable[[], object]],
    group: dist.ProcessGroup,
    rounds: int,
    budget_s: float,
) -> dict[str, list[tuple[float, float]]]:
    """Returns the seconds of one call in every round, by function, as pairs (function, reference). The reference runs
    directly before the function in one round and directly after it in the next, so that disturbances of the machine do
    not show in the difference of both."""
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
    """Returns the seconds of one run on the slowest rank, and its CPU seconds on this rank. The seconds are the median
    of the repeats, because a machine that takes a rank's core away makes only a few repeats long."""
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

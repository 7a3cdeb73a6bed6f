"""What each rank of the collectives benchmark does: `python -m meshwright.bench.collectives.rank ASKED FILE`, or the
ranks of a world that somebody else has launched."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor

from meshwright.bench.collectives.timing import alternating, stolen_s
from meshwright.bench.collectives.training import measure_training
from meshwright.bench.collectives.wires import measure_wires
from meshwright.cluster.cores import usable_cores
from meshwright.collectives.native import Native
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import Scheduled
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.shared_memory.two_level import TwoLevelMemory, machines_of
from meshwright.errors import InputError
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World
from meshwright.simulator.communication.schedules import Wires

TIMEOUT_S = 300.0
MEMORY_LIMIT = "memory_limit"


@dataclass(frozen=True)
class Asked:
    """`nodes`: treat the ranks as so many nodes of equal size; None: as many as they are on."""

    nodes: int | None
    sizes: tuple[int, ...]
    rounds: int = 7
    budget_s: float = 0.05  # of one algorithm, at one size, in one round
    in_training: bool = False


@dataclass(frozen=True)
class Found:
    """Seconds of every round by algorithm and size; `picked`: what `auto` is on these ranks; `refused`: why an
    algorithm cannot run on them. `training` as `collectives_training` tells it."""

    nodes: tuple[int, ...]
    machines: int
    cores: int
    threads: int
    wires: Wires
    picked: str
    times: dict[str, dict[int, list[float]]]
    refused: dict[str, str] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)  # of the machine, before and after
    stolen: float = 0.0  # cores that a virtual machine's host gave to others, on average
    training: dict[str, Any] | None = None


def measure(asked: Asked, world: World) -> Found:
    """Every rank of the world calls this; all are told the same."""
    group = dist.group.WORLD
    if group is None or world.size < 2:
        raise InputError("one rank has nobody to combine with: start two at least (--ranks 2)")
    torch.set_num_threads(1)
    before, began, stolen = os.getloadavg()[0], perf_counter(), stolen_s()
    machines = len(machines_of(group))
    nodes = _nodes(world.size, asked.nodes or machines)
    wires = measure_wires(group, nodes, machines)
    reducers, picked, refused = _reducers(group, nodes)
    times: dict[str, dict[int, list[float]]] = {name: {} for name in [*reducers, "auto", MEMORY_LIMIT]}
    for size in asked.sizes:
        ways = {name: _reducing(reducer, torch.ones(max(1, size // 4))) for name, reducer in reducers.items()}
        ways[MEMORY_LIMIT] = _copying(size)
        for name, found in alternating(ways, group, asked.rounds, asked.budget_s).items():
            times[name][size] = found
        times["auto"][size] = times[picked][size]  # the same reducer: measured twice, it would only tell of noise
    training = measure_training(group, world, reducers, asked.rounds) if asked.in_training else None
    dist.barrier(group)
    for reducer in reducers.values():
        reducer.close()
    load = (round(before, 2), round(os.getloadavg()[0], 2))
    lost = round((stolen_s() - stolen) / (perf_counter() - began), 3)
    return Found(
        nodes, machines, usable_cores(), torch.get_num_threads(), wires, picked, times, refused, load, lost, training
    )


def _nodes(ranks: int, nodes: int) -> tuple[int, ...]:
    if ranks % nodes:
        raise InputError(f"{ranks} ranks are no {nodes} nodes of equal size: choose --nodes that divides {ranks}")
    return (ranks // nodes,) * nodes


def _reducers(group: dist.ProcessGroup, nodes: tuple[int, ...]) -> tuple[dict[str, Reducer], str, dict[str, str]]:
    """One of each algorithm, what `auto` is here, and why others are not."""
    ranks = group.size()
    made: dict[str, Reducer] = {"native": Native(group)}
    for name in SCHEDULES:
        if name != "two_level" or len(nodes) > 1:
            made[name] = Scheduled(group, build(name, ranks, nodes))
    first = [sum(nodes[:place]) for place in range(len(nodes))]
    machines = [list(range(begin, begin + count)) for begin, count in zip(first, nodes, strict=True)]
    refused: dict[str, str] = {}
    makers: dict[str, Callable[[], Reducer]] = {"shared_memory": lambda: SharedMemory(group)}
    if len(nodes) > 1:
        makers["two_level_memory"] = lambda: TwoLevelMemory(group, machines)
    for name, make in makers.items():
        try:
            made[name] = make()
        except InputError as reason:
            refused[name] = str(reason)
    # As `make_reducer` does, on machines that are these nodes.
    wanted = "shared_memory" if len(nodes) == 1 else "two_level_memory"
    return made, wanted if wanted in made else "native", refused


def _reducing(reducer: Reducer, flat: Tensor) -> Callable[[], None]:
    def run() -> None:
        reducer.start(flat, 0)
        reducer.finish()

    return run


def _copying(size: int) -> Callable[[], None]:
    """As many bytes as an all-reduce in shared memory reads and writes, there and back within a rank's own."""
    one, other = torch.ones(max(1, size // 8)), torch.zeros(max(1, size // 8))

    def run() -> None:
        other.copy_(one)
        one.copy_(other)

    return run


def to_json(found: Found) -> str:
    return TypeAdapter(Found).dump_json(found).decode()


def from_json(text: str) -> Found:
    return TypeAdapter(Found).validate_json(text)


def main() -> None:
    asked, file = TypeAdapter(Asked).validate_json(sys.argv[1]), Path(sys.argv[2])

    def work(world: World, place: object) -> None:
        found = measure(asked, world)
        if world.rank == 0:
            file.write_text(to_json(found))

    run_rank(work, "cpu", TIMEOUT_S)


if __name__ == "__main__":
    main()

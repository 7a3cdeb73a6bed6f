"""What each rank of the collectives benchmark measures. A rank runs `python -m validation.bench.collectives.rank
REQUEST FILE`, or was started by another launcher and calls `measure`."""

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

from meshwright.cluster.cores import usable_cores
from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import ScheduledReducer
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.two_level import TwoLevelMemoryReducer, machines_of
from meshwright.errors import InputError
from meshwright.files.storage import write_atomically
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World
from meshwright.simulator.communication.cpu_network import CpuNetwork
from validation.bench.collectives.network import measure_network
from validation.bench.collectives.timing import stolen_s, time_alternating
from validation.bench.collectives.training import measure_training

TIMEOUT_S = 300.0
MEMORY_LIMIT = "memory_limit"  # no all-reduce: copies within memory, for comparison


@dataclass(frozen=True)
class MeasurementRequest:
    """What to measure. `nodes` is the number of nodes of equal size that the ranks are treated as; None takes the
    number of machines that they run on. `sizes` are in bytes."""

    nodes: int | None
    sizes: tuple[int, ...]
    rounds: int = 7
    budget_s: float = 0.05  # for one algorithm, at one size, in one round
    in_training: bool = False


@dataclass(frozen=True)
class CollectiveMeasurements:
    """What the ranks measured.

    nodes           the number of ranks of each node
    auto_algorithm  the algorithm that `auto` selects on these ranks
    times           the seconds of every round, by algorithm and size in bytes
    unavailable     the reasons why some algorithms cannot run on these ranks, by algorithm
    load            the load average of this rank's machine before and after
    stolen_cores    the number of cores, on average, that the host of a virtual machine gave to other machines
    training        the result of `measure_training`; None if it was not requested
    """

    nodes: tuple[int, ...]
    machines: int
    cores: int
    threads: int
    network: CpuNetwork
    auto_algorithm: str
    times: dict[str, dict[int, list[float]]]
    unavailable: dict[str, str] = field(default_factory=dict)
    load: tuple[float, float] = (0.0, 0.0)
    stolen_cores: float = 0.0
    training: dict[str, Any] | None = None


def measure(request: MeasurementRequest, world: World) -> CollectiveMeasurements:
    """Measures every algorithm. All ranks of the world call this function together, and get the same times; `cores`,
    `load` and `stolen_cores` are those of each rank's own machine."""
    group = dist.group.WORLD
    if group is None or world.size < 2:
        raise InputError("an all-reduce needs several ranks: start at least two (--ranks 2)")
    torch.set_num_threads(1)
    load_before, begin, stolen_before_s = os.getloadavg()[0], perf_counter(), stolen_s()
    machines = len(machines_of(group))
    nodes = _nodes(world.size, request.nodes or machines)
    network = measure_network(group, nodes, machines)
    reducers, auto_algorithm, unavailable = _reducers(group, nodes)
    times: dict[str, dict[int, list[float]]] = {name: {} for name in [*reducers, "auto", MEMORY_LIMIT]}
    for size in request.sizes:
        runs = {name: _all_reduce_run(reducer, torch.ones(max(1, size // 4))) for name, reducer in reducers.items()}
        runs[MEMORY_LIMIT] = _copy_run(size)
        for name, rounds_s in time_alternating(runs, group, request.rounds, request.budget_s).items():
            times[name][size] = rounds_s
        # `auto` is the same reducer, so measuring it again would only show noise.
        times["auto"][size] = times[auto_algorithm][size]
    training = measure_training(group, world, reducers, request.rounds) if request.in_training else None
    dist.barrier(group)
    for reducer in reducers.values():
        reducer.close()
    stolen_cores = (stolen_s() - stolen_before_s) / (perf_counter() - begin)
    return CollectiveMeasurements(
        nodes=nodes,
        machines=machines,
        cores=usable_cores(),
        threads=torch.get_num_threads(),
        network=network,
        auto_algorithm=auto_algorithm,
        times=times,
        unavailable=unavailable,
        load=(round(load_before, 2), round(os.getloadavg()[0], 2)),
        stolen_cores=round(stolen_cores, 3),
        training=training,
    )


def _nodes(ranks: int, nodes: int) -> tuple[int, ...]:
    if ranks % nodes:
        raise InputError(f"{ranks} ranks cannot form {nodes} nodes of equal size: choose --nodes that divides {ranks}")
    return (ranks // nodes,) * nodes


def _reducers(group: dist.ProcessGroup, nodes: tuple[int, ...]) -> tuple[dict[str, Reducer], str, dict[str, str]]:
    """Returns a reducer of every algorithm that can run, by name; the name of the one that `auto` selects; and the
    reasons why other algorithms cannot run, by name."""
    ranks = group.size()
    reducers: dict[str, Reducer] = {"native": NativeReducer(group)}
    for name in SCHEDULES:
        if name != "two_level" or len(nodes) > 1:
            reducers[name] = ScheduledReducer(group, build(name, ranks, nodes))
    first_ranks = [sum(nodes[:node]) for node in range(len(nodes))]
    machines = [list(range(first, first + count)) for first, count in zip(first_ranks, nodes, strict=True)]
    unavailable: dict[str, str] = {}
    makers: dict[str, Callable[[], Reducer]] = {"shared_memory": lambda: SharedMemoryReducer(group)}
    if len(nodes) > 1:
        makers["two_level_memory"] = lambda: TwoLevelMemoryReducer(group, machines)
    for name, make in makers.items():
        try:
            reducers[name] = make()
        except InputError as reason:
            unavailable[name] = str(reason)
    # What `make_reducer` would choose for `auto` if each of these nodes were a machine.
    preferred = "shared_memory" if len(nodes) == 1 else "two_level_memory"
    return reducers, preferred if preferred in reducers else "native", unavailable


def _all_reduce_run(reducer: Reducer, flat: Tensor) -> Callable[[], None]:
    def run() -> None:
        reducer.start(flat, 0)
        reducer.finish()

    return run


def _copy_run(size: int) -> Callable[[], None]:
    """Returns a function that copies as many bytes within a rank's memory as an all-reduce in shared memory reads and
    writes."""
    first, second = torch.ones(max(1, size // 8)), torch.zeros(max(1, size // 8))

    def run() -> None:
        second.copy_(first)
        first.copy_(second)

    return run


def to_json(measured: CollectiveMeasurements) -> str:
    return TypeAdapter(CollectiveMeasurements).dump_json(measured).decode()


def from_json(text: str) -> CollectiveMeasurements:
    return TypeAdapter(CollectiveMeasurements).validate_json(text)


def main() -> None:
    request, file = TypeAdapter(MeasurementRequest).validate_json(sys.argv[1]), Path(sys.argv[2])

    def measure_as_rank(world: World, _: object) -> None:
        measured = measure(request, world)
        if world.rank == 0:
            write_atomically(file, to_json(measured))

    run_rank(measure_as_rank, "cpu", TIMEOUT_S)


if __name__ == "__main__":
    main()

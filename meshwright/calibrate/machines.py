"""The machines on which a launcher has started ranks, as a cluster: each machine's devices, and the links between the
machines, which are measured by the ranks themselves. All ranks call these functions together.

    machine         ranks with the same `machine_name`: containers of one host are several machines, because they reach
                    each other through a network
    link            the times of collectives between the first ranks of all machines, and between all ranks
"""

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from itertools import groupby
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.calibrate.link_curves import SIZES, collective_operation
from meshwright.calibrate.probe import measure_machine
from meshwright.calibrate.timing import elapsed
from meshwright.cluster.cache import load_machines, save_machines
from meshwright.cluster.cluster import Cluster, Collective, Curve, Link, Node
from meshwright.cluster.cores import usable_cores
from meshwright.cluster.curves import rising
from meshwright.cluster.detect import find_cluster
from meshwright.cluster.gpus import driver_version
from meshwright.messages.exchange import all_gather_values, broadcast_value
from meshwright.processes.network.machine import machine_name
from meshwright.processes.world import World

COLLECTIVES: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter", "point_to_point")
_ROUNDS = 3
_AS_FAST = 0.8  # a chosen value: measured rates of equal machines differ by less, also under some load
_LONGEST_S = 0.5  # larger messages are not measured on a link on which a message takes longer

Points = dict[Collective, list[tuple[int, float]]]  # (bytes, seconds)


@dataclass(frozen=True)
class Machine:
    """One machine. `ranks` are its ranks. `clock_s` is how far its clock is ahead of the first machine's, and
    `bandwidth_bytes_per_s` and `latency_s` are those of the link to the first machine; 0 for the first."""

    host: str
    ranks: tuple[int, ...]
    device: str
    cores: int
    torch: str
    driver: str
    clock_s: float = 0.0
    bandwidth_bytes_per_s: float = 0.0
    latency_s: float = 0.0


@dataclass(frozen=True)
class Machines:
    """What was measured: the machines in the order of their ranks, and the cluster that they are."""

    machines: tuple[Machine, ...]
    cluster: Cluster


def find_measured_machines(world: World) -> Cluster | None:
    """The cluster of these machines, if it was measured before; None on ranks other than 0."""
    machines = _list_machines(world)
    return load_machines(_cache_key(machines)) if world.rank == 0 else None


def measure_machines(world: World) -> Machines | None:
    """Measures the devices of every machine and the links between machines, and stores the result in the cache. Returns
    it on rank 0, and None on other ranks."""
    machines = _list_machines(world)
    firsts = [machine.ranks[0] for machine in machines]
    nodes = all_gather_values(_measure_node(world, machines) if world.rank in firsts else None)
    to_first = [_measure_link((firsts[0], first), world) for first in firsts[1:]]
    curves = _measure_curves(firsts, world)
    if world.rank != 0:
        return None
    links = [_link_to_first(points) for points in to_first]
    described = [
        Machine(**{**asdict(machine), "bandwidth_bytes_per_s": bandwidth, "latency_s": latency})
        for machine, (bandwidth, latency) in zip(machines, [(0.0, 0.0), *links], strict=True)
    ]
    cluster = _cluster([Node.model_validate(nodes[first]) for first in firsts], links, curves)
    save_machines(_cache_key(machines), cluster)
    return Machines(tuple(described), cluster)


def _list_machines(world: World) -> list[Machine]:
    """The machines, without their links; the same on all ranks."""
    gpu = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    dist.barrier()
    own = {
        "host": socket.gethostname(),
        "machine": machine_name(),
        "rank": world.rank,
        "device": gpu or find_cluster("1xcpu").nodes[0].device.name,
        "cores": usable_cores(),
        "torch": str(torch.__version__),
        "driver": driver_version() if gpu else "",
        "clock_s": time.time(),
    }
    by_machine = sorted(all_gather_values(own), key=lambda rank: (rank["machine"], rank["rank"]))
    groups = [list(ranks) for _, ranks in groupby(by_machine, key=lambda rank: rank["machine"])]
    groups.sort(key=lambda ranks: ranks[0]["rank"])
    begin_s = groups[0][0]["clock_s"]
    return [
        Machine(
            host=ranks[0]["host"],
            ranks=tuple(rank["rank"] for rank in ranks),
            device=ranks[0]["device"],
            cores=ranks[0]["cores"],
            torch=ranks[0]["torch"],
            driver=ranks[0]["driver"],
            clock_s=ranks[0]["clock_s"] - begin_s,
        )
        for ranks in groups
    ]


def _cache_key(machines: Sequence[Machine]) -> list[Any]:
    """What the result depends on, besides the machines' load."""
    return [[machine.host, len(machine.ranks), machine.device, machine.torch] for machine in machines]


def _measure_node(world: World, machines: Sequence[Machine]) -> dict[str, Any]:
    """The node of this machine, of which this rank is the first, with as many devices as it has ranks."""
    count = next(len(machine.ranks) for machine in machines if machine.ranks[0] == world.rank)
    if world.device.type == "cpu":
        (node,) = find_cluster(f"{count}xcpu", measure_machine).nodes
    else:
        (node,) = find_cluster("local", measure_machine).nodes
        node = node.model_copy(update={"count": count})
    return node.model_dump(mode="json")


def _measure_curves(firsts: Sequence[int], world: World) -> list[tuple[int, int, Points]]:
    """(ranks, machines, points) of the collectives between the first ranks of all machines, and between all ranks."""
    curves = [(len(firsts), len(firsts), _measure_link(firsts, world))]
    if world.size > len(firsts):
        curves.append((world.size, len(firsts), _measure_link(range(world.size), world)))
    return curves


def _measure_link(ranks: Sequence[int], world: World) -> Points:
    """Points (bytes, seconds) of each collective between these ranks. Complete on the first of them; empty on ranks
    that are not among them."""
    group = dist.new_group(list(ranks))  # every rank has to call it
    points: Points = {}
    if world.rank in ranks:
        for collective in COLLECTIVES:
            points[collective] = _measure_collective(collective, len(ranks), world.device, group)
    dist.barrier()
    return points


def _measure_collective(
    collective: Collective, ranks: int, device: torch.device, group: dist.ProcessGroup
) -> list[tuple[int, float]]:
    points: list[tuple[int, float]] = []
    for size in SIZES[device.type]:
        run = collective_operation(collective, size, ranks, device, group)
        run()
        points.append((size, median(elapsed(run, device, 1) for _ in range(_ROUNDS))))
        if broadcast_value(points[-1][1] > _LONGEST_S, group):  # the ranks measure different times, and stop together
            break
    return points


def _link_to_first(points: Points) -> tuple[float, float]:
    """Bandwidth and latency, from messages of which each is confirmed."""
    messages = points["point_to_point"]
    size, seconds = messages[-1]
    return size / seconds, messages[0][1] / 2


def _cluster(
    nodes: Sequence[Node], links: Sequence[tuple[float, float]], curves: Sequence[tuple[int, int, Points]]
) -> Cluster:
    """The cluster of the machines, in the order of their ranks. Neighbours with equal devices that are about equally
    fast are one node with a number; the measurements of its first machine stand for all."""
    grouped: list[Node] = []
    for node in nodes:
        if grouped and _is_as_fast(node, grouped[-1]):
            grouped[-1] = grouped[-1].model_copy(update={"number": grouped[-1].number + 1})
        else:
            grouped.append(node)
    source = f"measured: torch {torch.__version__}, {date.today().isoformat()}"
    link = None
    if len(nodes) > 1:
        link = Link(
            name="measured",
            bandwidth_bytes_per_s=min(bandwidth for bandwidth, _ in links),
            latency_s=max(latency for _, latency in links),
            curves={
                collective: tuple(
                    Curve(ranks=ranks, nodes=machines, points=rising(points[collective]), source=source)
                    for ranks, machines, points in curves
                )
                for collective in COLLECTIVES
            },
            sources={"bandwidth_bytes_per_s": source, "latency_s": source},
        )
    return Cluster(name=f"{len(nodes)} machines", nodes=tuple(grouped), link=link, based_on="measured")


def _is_as_fast(node: Node, other: Node) -> bool:
    """Whether a machine has as many devices of the same name as another, and about as fast ones."""
    device, rates = node.device, other.device.rates
    if (device.name, node.count, node.cores) != (other.device.name, other.count, other.cores):
        return False
    slower = [
        min(rate, rates[dtype]) / max(rate, rates[dtype]) for dtype, rate in device.rates.items() if rates.get(dtype)
    ]
    return min(slower, default=1.0) >= _AS_FAST

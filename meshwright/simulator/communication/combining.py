"""How long gradients take to be combined over the replicate axis by the algorithm that a plan names; and which one it
should name.

    GPU ranks      the backend's own                                                         communication.collective_s
    CPU ranks      by schedules.py, on the cluster's links and what hosts of its kind take   wires_of
    auto           shared memory on one node; on several that, and messages between them; else the backend's own
    native         the backend's own: its measured curves                                    communication.collective_s
    chosen         the cheapest, by schedules.choose; `auto` where that is what `auto` does  chosen_algorithm

Where nodes have different numbers of the ranks, or where these are more than schedules.py follows, the backend's price
stands for all.
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveFloat

from meshwright.cluster.cluster import Cluster, Node
from meshwright.collectives.schedules.builders import build
from meshwright.plan import Algorithm
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import Group
from meshwright.simulator.communication.schedules import (
    MOST_RANKS,
    Host,
    Memory,
    Tier,
    Wires,
    choose,
    schedule_s,
    shared_memory_s,
    two_level_memory_s,
)
from meshwright.yaml_file import read_mapping, validated

FILE = Path(__file__).with_name("host_costs.yaml")


class HostCosts(BaseModel):
    """The fields are described in host_costs.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    message_s: PositiveFloat
    native_message_s: PositiveFloat
    native_latency: PositiveFloat
    byte_s: PositiveFloat
    thread_s: PositiveFloat
    call_s: PositiveFloat
    sync_s: PositiveFloat
    staged_s: PositiveFloat
    reduce: PositiveFloat
    scatter: PositiveFloat
    gather: PositiveFloat
    sources: dict[str, str]


@lru_cache
def host_costs() -> HostCosts:
    return validated(HostCosts, read_mapping(FILE, "simulator"), f"simulator: {FILE.name}")


def combine_s(size_bytes: float, group: Group, algorithm: Algorithm, cluster: Cluster) -> float:
    """Seconds of one bucket."""
    native = algorithm == "native" or (algorithm in ("auto", "shared_memory") and _auto(group) == "native")
    if cluster.kind != "cpu" or native or not _is_followed(group):
        return collective_s("all_reduce", size_bytes, group, cluster)
    return _priced(int(size_bytes), _nodes(group), algorithm, wires_of(cluster, group))


def chosen_algorithm(size_bytes: float, group: Group, cluster: Cluster) -> Algorithm:
    """What a plan should say for buckets of that size."""
    if cluster.kind != "cpu" or not _is_followed(group):
        return "auto"
    found = _cheapest(int(size_bytes), _nodes(group), wires_of(cluster, group))
    if found in (_auto(group), "two_level_memory"):
        return "auto"
    named: dict[str, Algorithm] = {
        "native": "native",
        "ring": "ring",
        "tree": "tree",
        "halving_doubling": "halving_doubling",
        "two_level": "two_level",
        "shared_memory": "shared_memory",
    }
    return named[found]


@lru_cache(maxsize=4096)
def _priced(size: int, nodes: tuple[int, ...], algorithm: Algorithm, wires: Wires) -> float:
    if algorithm in ("auto", "shared_memory"):
        return shared_memory_s(size, nodes[0], wires) if len(nodes) == 1 else two_level_memory_s(size, nodes, wires)
    return schedule_s(build(algorithm, sum(nodes), nodes), size, wires, nodes)


@lru_cache(maxsize=4096)
def _cheapest(size: int, nodes: tuple[int, ...], wires: Wires) -> str:
    return choose(size, sum(nodes), nodes, wires)[0]


def _auto(group: Group) -> str:
    if group.nodes == 1:
        return "shared_memory"
    return "two_level_memory" if group.per_node == group.fewest and group.fewest > 1 else "native"


def _is_followed(group: Group) -> bool:
    return group.per_node == group.fewest and group.ranks <= MOST_RANKS


def _nodes(group: Group) -> tuple[int, ...]:
    return (group.per_node,) * group.nodes


def wires_of(cluster: Cluster, group: Group) -> Wires:
    """For such a group of CPU ranks. Its ranks on a node share the cores with all others there."""
    costs = host_costs()
    node = min(cluster.nodes, key=lambda node: node.device.bandwidth_bytes_per_s)
    within = _within(node)
    across = None
    if cluster.link is not None and group.nodes > 1:
        link = cluster.link
        together = link.bandwidth_bytes_per_s * node.count / max(1, group.sharing)
        across = Tier(link.latency_s, link.bandwidth_bytes_per_s, together)
    core = node.device.bandwidth_bytes_per_s
    host = Host(
        cores=node.cores,
        message_s=costs.message_s,
        native_message_s=costs.native_message_s,
        native_latency=costs.native_latency,
        byte_s=costs.byte_s,
        thread_s=costs.thread_s,
        call_s=costs.call_s,
        add_bytes_per_s=core / 3,  # two are read, one is written
        copy_bytes_per_s=core / 2,
    )
    return Wires(within, across, host, _memory(node, group.per_node, costs))


def _within(node: Node) -> Tier:
    """The link's figures are those of an all-reduce of two: two rounds of half of it, each behind a word that there is
    room; both send at once."""
    bandwidth = node.link.bandwidth_bytes_per_s
    return Tier(node.link.latency_s / 2, 2 * bandwidth, max(2, node.cores) * bandwidth)


def _memory(node: Node, ranks: int, costs: HostCosts) -> Memory:
    """Ranks that share a core wait for each other's turn, and share its bandwidth; the device's is a rank's already."""
    crowded = max(1.0, ranks / node.cores)
    core = node.device.bandwidth_bytes_per_s
    moved = {"reduce": 2.0, "scatter": 1 + 1 / ranks, "gather": max(2 * (ranks - 1) / ranks, 1 / ranks)}
    rates = {name: ((1, getattr(costs, name) * core / of_one),) for name, of_one in moved.items()}
    found = Memory(costs.sync_s, costs.staged_s, **rates)
    return replace(found, sync_s=costs.sync_s * crowded, staged_s=costs.staged_s * crowded)

"""Seconds that gradients take to be combined over the replicate axis by the algorithm that a plan names, and the
algorithm that a plan should name.

    GPU ranks      the backend's own all-reduce                                          collectives.collective_s
    CPU ranks      schedules.py, with the cluster's links and the costs of CPU hosts     cpu_network
    auto           one node: shared memory; several nodes with several ranks each: shared memory, and messages between
                   nodes; else the backend's own                                         _automatic_algorithm
    native         the backend's own all-reduce, by its measured curves                  collectives.collective_s
    fastest        the cheapest one; `auto` where `auto` would choose it                 fastest_algorithm

If nodes have different numbers of ranks, or if there are more ranks than schedules.py replays, the seconds of the
backend's own all-reduce are used for every algorithm.
"""

from functools import lru_cache
from pathlib import Path
from typing import cast

from pydantic import BaseModel, ConfigDict, PositiveFloat

from meshwright.cluster.cluster import Cluster, Node
from meshwright.collectives.schedules.builders import build
from meshwright.files.yaml_file import read_mapping, validate
from meshwright.plan_fields.groups import Algorithm
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.cpu_network import CpuNetwork, HostSpeed, LinkTier, SharedMemorySpeed
from meshwright.simulator.communication.placement import RankGroup
from meshwright.simulator.communication.schedules import (
    MOST_RANKS,
    cheapest_algorithm,
    schedule_s,
    shared_memory_s,
    two_level_memory_s,
)

FILE = Path(__file__).with_name("host_costs.yaml")


class HostCosts(BaseModel):
    """The costs of communication on CPU hosts that were not measured. The fields are described in host_costs.yaml and
    in `HostSpeed` and `SharedMemorySpeed`."""

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
    return validate(HostCosts, read_mapping(FILE, "simulator"), f"simulator: {FILE.name}")


def combine_s(size_bytes: float, group: RankGroup, algorithm: Algorithm, cluster: Cluster) -> float:
    """Seconds to all-reduce one bucket of gradients of `size_bytes` over the group, with the plan's algorithm."""
    uses_native = algorithm == "native" or (
        algorithm in ("auto", "shared_memory") and _automatic_algorithm(group) == "native"
    )
    if cluster.kind != "cpu" or uses_native or not _is_replayed(group):
        return collective_s("all_reduce", size_bytes, group, cluster)
    return _algorithm_s(int(size_bytes), _ranks_of_nodes(group), algorithm, cpu_network(cluster, group))


def fastest_algorithm(size_bytes: float, group: RankGroup, cluster: Cluster) -> Algorithm:
    """The algorithm that a plan should name for buckets of `size_bytes`; `auto` if `auto` chooses the fastest one."""
    if cluster.kind != "cpu" or not _is_replayed(group):
        return "auto"
    fastest = _cheapest(int(size_bytes), _ranks_of_nodes(group), cpu_network(cluster, group))
    if fastest in (_automatic_algorithm(group), "two_level_memory"):
        return "auto"
    return cast(Algorithm, fastest)


@lru_cache(maxsize=4096)
def _algorithm_s(size_bytes: int, nodes: tuple[int, ...], algorithm: Algorithm, network: CpuNetwork) -> float:
    if algorithm in ("auto", "shared_memory"):
        if len(nodes) == 1:
            return shared_memory_s(size_bytes, nodes[0], network)
        return two_level_memory_s(size_bytes, nodes, network)
    return schedule_s(build(algorithm, sum(nodes), nodes), size_bytes, network, nodes)


@lru_cache(maxsize=4096)
def _cheapest(size_bytes: int, nodes: tuple[int, ...], network: CpuNetwork) -> str:
    return cheapest_algorithm(size_bytes, sum(nodes), nodes, network)[0]


def _automatic_algorithm(group: RankGroup) -> str:
    """The algorithm that a plan's `auto` uses for this group of CPU ranks: `shared_memory`, `two_level_memory` or
    `native`."""
    if group.nodes == 1:
        return "shared_memory"
    return "two_level_memory" if group.per_node == group.min_per_node and group.min_per_node > 1 else "native"


def _is_replayed(group: RankGroup) -> bool:
    return group.per_node == group.min_per_node and group.ranks <= MOST_RANKS


def _ranks_of_nodes(group: RankGroup) -> tuple[int, ...]:
    return (group.per_node,) * group.nodes


def cpu_network(cluster: Cluster, group: RankGroup) -> CpuNetwork:
    """The speeds of a group of CPU ranks on this cluster. Groups that send through one node's network at the same time
    share its bandwidth."""
    costs = host_costs()
    node = min(cluster.nodes, key=lambda node: node.device.bandwidth_bytes_per_s)
    across = None
    if cluster.link is not None and group.nodes > 1:
        link = cluster.link
        together = link.bandwidth_bytes_per_s * node.count / max(1, group.network_groups)
        across = LinkTier(link.latency_s, link.bandwidth_bytes_per_s, together)
    core_bytes_per_s = node.device.bandwidth_bytes_per_s
    host = HostSpeed(
        cores=node.cores,
        message_s=costs.message_s,
        native_message_s=costs.native_message_s,
        native_latency=costs.native_latency,
        byte_s=costs.byte_s,
        thread_s=costs.thread_s,
        call_s=costs.call_s,
        add_bytes_per_s=core_bytes_per_s / 3,  # two numbers are read, one is written
        copy_bytes_per_s=core_bytes_per_s / 2,
    )
    return CpuNetwork(_tier_within(node), across, host, _shared_memory_speed(node, group.per_node, costs))


def _tier_within(node: Node) -> LinkTier:
    """The link within a node. The figures of `node.link` were measured with an all-reduce of two ranks, in which both
    send half of the tensor at once, two times. The receiver of each half first sends a message that it is ready, so the
    latency of one message is half of the link's, and the bandwidth of both messages together is twice the link's."""
    bandwidth = node.link.bandwidth_bytes_per_s
    return LinkTier(node.link.latency_s / 2, 2 * bandwidth, max(2, node.cores) * bandwidth)


def _shared_memory_speed(node: Node, ranks: int, costs: HostCosts) -> SharedMemorySpeed:
    """The speed of shared memory between `ranks` ranks of a node. Ranks that share a core wait for each other, so
    barriers take longer. The rates need no such correction, because the device's bandwidth is already that of one
    rank."""
    ranks_per_core = max(1.0, ranks / node.cores)
    core_bytes_per_s = node.device.bandwidth_bytes_per_s
    moved_bytes = {"reduce": 2.0, "scatter": 1 + 1 / ranks, "gather": max(2 * (ranks - 1) / ranks, 1 / ranks)}
    rates = {name: ((1, getattr(costs, name) * core_bytes_per_s / moved),) for name, moved in moved_bytes.items()}
    return SharedMemorySpeed(costs.sync_s * ranks_per_core, costs.staged_s * ranks_per_core, **rates)

"""Seconds of a collective on a cluster with the cheapest algorithm, and how much of them is not hidden behind compute.

A tensor has S bytes; there are n ranks on m nodes with k ranks each. For the link within nodes (in) and the link
between nodes (out), b is the bandwidth that collectives reach and h the seconds of one more hop; p is the softness of
the outermost link that is used. Measured curves are preferred to the formulas:

    curve       = what was measured for this collective, these ranks and nodes                      _measured_s
    blend       = (L^p + W^p)^(1/p), L seconds of latency, W seconds of transmission                blend_s
    b_in        = link × ring_share × (1 - few_ranks_loss / k), at most bridge / bridge_groups      _tier_within
    b_out       = link × ring_share, at most the limit of a CPU rank; `min_per_node` ranks of a
                  node send at once                                                                 _tier_between
    w           = 2 (n-1)/n all_reduce; (n-1)/n all_gather, reduce_scatter; 1 broadcast             sent_share
    ring        : W = w S / min(b_in, min_per_node b_out),   L = start + steps h                    _ring_s
    tree        : W = max(2 S / b_in, (1 if m = 2 else 2) S / (min_per_node b_out)) / tree_share,
                  L = start + 2 (k-1) h_in + 2 log2(m) h_out; 2 S / b_in is S (1 + 1/k) / multicast
                  where switches reduce                                                             _tree_s
    multicast   : W = S (1 + 1/k) / multicast,               L = start + 2 h_in                     _multicast_s
    two_level   = reduce_scatter(in, S) + all_reduce(out, S / k, a rank a node) + all_gather(in, S) _two_level_s
    all_to_all  : W = max((k-1)/n S / b_in, (n-k)/n S / b_out), L = start + (n-2) peer              _all_to_all_s
    send        : W = S / b of the outermost tier,           L = start                              _send_s
    overlap     = both slowed down until the shorter one ends, then the rest alone                  overlap

S is the whole tensor: what every rank has after an all-gather or before a reduce-scatter, what one rank sends in all
in an all-to-all, the message of a `point_to_point`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from meshwright.cluster.catalog import CATALOG, find_link
from meshwright.cluster.cluster import Cluster, Collective, DeviceKind, Link, Node
from meshwright.cluster.curves import curve_time, smallest_measured_bytes
from meshwright.errors import InputError
from meshwright.files.yaml_file import read_mapping, validate
from meshwright.simulator.communication.placement import RankGroup

Algorithm = Literal["ring", "tree", "multicast", "two_level", "direct", "curve"]

# How much longer compute and communication take while both run. Compute: Lee et al. 2025 (arXiv 2507.03114), 18.9% on
# average over A100, H100, MI210 and MI250. Communication: assumed to be slowed down as much, since Galvatron (Miao et
# al. 2022, PVLDB 16(3), arXiv 2211.13878) has one factor for both, 1.3 by the overlap test in its repository.
COMPUTE_SLOWDOWN = 1.189
COMMUNICATION_SLOWDOWN = 1.189
# Share of a CPU rank's core that communication takes while it computes. 1 is the assumption that nothing is hidden,
# because the cores that compute also copy and add what is communicated. `python -m validation.steps.steps mnist` on a
# CPU prints the predicted and the measured step of two ranks.
CORE_SHARE = 1.0


class LinkEfficiency(BaseModel):
    """The share of the datasheet's bandwidth and latency that collectives reach on a family of links. The fields are
    described in catalog/link_efficiency.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    links: tuple[str, ...]
    ring_share: PositiveFloat
    few_ranks_loss: float
    hop_share: float
    softness: PositiveFloat
    rank_limit_bytes_per_s: PositiveFloat = float("inf")
    multicast_share: float = 0.0
    multicast_links: tuple[str, ...] = ()
    mesh_devices: int = 0
    mesh_ring_shares: dict[int, float] = {}
    bridge_bytes_per_s: dict[str, float] = {}
    sources: dict[str, str]


class LinkEfficiencies(BaseModel):
    """The efficiencies of all families of links, and the values that do not depend on the link. The fields are
    described in catalog/link_efficiency.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: dict[str, LinkEfficiency]
    tree_share: PositiveFloat
    peer_s: float
    launch_s: dict[DeviceKind, float]
    sources: dict[str, str]

    def family(self, link: Link) -> str:
        """The name of the link's family. A family lists beginnings of link names; the longest one with which this
        link's name begins decides."""
        matches = [
            (len(prefix), name)
            for name, efficiency in self.families.items()
            for prefix in efficiency.links
            if link.name.startswith(prefix)
        ]
        return max(matches)[1]

    def of_link(self, link: Link) -> LinkEfficiency:
        return self.families[self.family(link)]


@lru_cache
def link_efficiencies() -> LinkEfficiencies:
    """The efficiencies in catalog/link_efficiency.yaml."""
    raw = read_mapping(CATALOG / "link_efficiency.yaml", "catalog")
    raw.pop("_shared")
    return validate(LinkEfficiencies, raw, "catalog: link_efficiency.yaml")


@dataclass(frozen=True)
class CollectivePrice:
    """The seconds of a collective and the algorithm that takes them. `based_on` is `measured` if they come from a
    measured curve, and `fitted` if they come from the link's datasheet figures times its efficiency."""

    seconds: float
    algorithm: Algorithm
    based_on: Literal["measured", "fitted"]


@dataclass(frozen=True)
class _Tier:
    """The bandwidth and latency that one rank of a collective gets from the link within nodes, or from the link between
    nodes. `multicast` is the bandwidth of reductions in the switches, 0 if switches cannot reduce."""

    bandwidth: float
    start_s: float
    hop_s: float
    softness: float
    multicast: float = 0.0


def collective_s(
    kind: Collective, size_bytes: float, group: RankGroup, cluster: Cluster, algorithm: Algorithm | None = None
) -> float:
    """Seconds of a collective on the device, with `algorithm` or, if that is None, from a measured curve or with the
    cheapest algorithm."""
    return collective_price(kind, size_bytes, group, cluster, algorithm).seconds


def collective_launch_s(cluster: Cluster) -> float:
    """Seconds that the host needs to launch one collective. `collective_s` does not include them, because they are
    hidden while the host runs ahead of the device."""
    return link_efficiencies().launch_s[cluster.kind]


def collective_price(
    kind: Collective,
    size_bytes: float,
    group: RankGroup,
    cluster: Cluster,
    algorithm: Algorithm | None = None,
    efficiencies: LinkEfficiencies | None = None,
) -> CollectivePrice:
    """The seconds of a collective with `algorithm` or, if that is None, from a measured curve or with the cheapest
    algorithm. `efficiencies` replace those of the catalog. Raises `InputError` if the collective has no such
    algorithm."""
    if group.ranks == 1:
        return CollectivePrice(0.0, "direct", "measured")
    efficiencies = efficiencies or link_efficiencies()
    options = _algorithm_options_s(kind, size_bytes, group, cluster, efficiencies)
    if algorithm is None:
        seconds = _measured_s(kind, size_bytes, group, cluster, efficiencies, min(options.values()))
        if seconds is not None:
            return CollectivePrice(seconds, "curve", "measured")
    if algorithm is not None and algorithm not in options:
        raise InputError(
            f"{kind} has no algorithm '{algorithm}' for {group.ranks} ranks on {group.nodes} nodes of"
            f" '{cluster.name}': choose {' or '.join(options)}"
        )
    cheapest: Algorithm = algorithm if algorithm else min(options, key=options.__getitem__)
    return CollectivePrice(options[cheapest], cheapest, "fitted")


def _algorithm_options_s(
    kind: Collective, size: float, group: RankGroup, cluster: Cluster, efficiencies: LinkEfficiencies
) -> dict[Algorithm, float]:
    """The seconds of each algorithm with which this group can run the collective."""
    inner, outer = _tier_within(group, cluster, efficiencies), _tier_between(group, cluster, efficiencies)
    if kind == "point_to_point":
        return {"direct": _send_s(size, group, inner, outer)}
    if kind == "all_to_all":
        return {"direct": _all_to_all_s(size, group, inner, outer, efficiencies.peer_s)}
    options: dict[Algorithm, float] = {"ring": _ring_s(kind, size, group, inner, outer)}
    if kind == "all_reduce" and group.nodes > 1:
        options["tree"] = _tree_s(size, group, inner, outer, efficiencies.tree_share)
        if group.min_per_node > 1:
            options["two_level"] = _two_level_s(size, group, inner, outer, efficiencies.tree_share)
    elif kind == "all_reduce" and inner.multicast:
        options["multicast"] = _multicast_s(size, group, inner)
    return options


def _measured_s(
    kind: Collective, size: float, group: RankGroup, cluster: Cluster, efficiencies: LinkEfficiencies, fitted_s: float
) -> float | None:
    """Seconds from a curve that was measured for these ranks and nodes; None if there is none. Two other curves may
    stand in for a missing one. If switches do not reduce, a reduce-scatter or an all-gather takes half as long as an
    all-reduce. Between CPU ranks of one machine, each message of any collective takes as long as one of the two
    messages that follow each other in an all-reduce of two ranks."""
    link = cluster.link if group.nodes > 1 else _slowest_node(cluster).link
    if link is None or group.per_node != group.min_per_node:
        return None
    efficiency = efficiencies.of_link(link)
    if _slowest_node(cluster).count < efficiency.mesh_devices:
        return None  # the curves were measured on nodes with more devices
    seconds = _curve_s(link, kind, size, group, fitted_s)
    if seconds is None and link.name not in efficiency.multicast_links and kind in ("all_gather", "reduce_scatter"):
        all_reduce_s = _curve_s(link, "all_reduce", size, group, 2 * fitted_s)
        seconds = None if all_reduce_s is None else all_reduce_s / 2
    if seconds is None and cluster.kind == "cpu" and group.nodes == 1:
        rounds, share = _rounds(kind, group.ranks)
        two_ranks_s = curve_time(link, "all_reduce", 2 * share * size, 2)  # two rounds of half of its tensor
        seconds = None if two_ranks_s is None else rounds * two_ranks_s / 2
    return seconds


def _curve_s(link: Link, kind: Collective, size: float, group: RankGroup, fitted_s: float) -> float | None:
    """Seconds from the curve; None if there is none. Below the sizes that were measured, they are at least `fitted_s`,
    but at most those of the smallest measured size."""
    seconds = curve_time(link, kind, size, group.ranks, group.nodes)
    smallest = smallest_measured_bytes(link, kind, group.ranks, group.nodes)
    if seconds is None or smallest is None or size >= smallest:
        return seconds
    return max(seconds, min(fitted_s, curve_time(link, kind, smallest, group.ranks, group.nodes) or fitted_s))


def _rounds(kind: Collective, ranks: int) -> tuple[int, float]:
    """The number of messages that follow each other in a collective, and the share of the tensor that each of them
    has."""
    if kind == "point_to_point":
        return 1, 1.0
    if kind == "broadcast":
        return ceil(log2(ranks)), 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1), 1 / ranks


def blend_s(latency_s: float, transmission_s: float, softness: float) -> float:
    """Seconds of a collective with this latency and transmission time, blended as in the module's equation. Libraries
    change protocols and channels with the size, so there is no sharp corner between the two."""
    return float((latency_s**softness + transmission_s**softness) ** (1 / softness))


def sent_share(kind: Collective, ranks: int) -> float:
    """The share of the tensor that each rank of a ring sends."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "point_to_point") else (ranks - 1) / ranks


def _steps(kind: Collective, ranks: int) -> int:
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def _ring_s(kind: Collective, size: float, group: RankGroup, inner: _Tier, outer: _Tier | None) -> float:
    sent_bytes = sent_share(kind, group.ranks) * size
    steps, steps_between = _steps(kind, group.ranks), _steps(kind, group.nodes)
    if outer is None:
        return blend_s(inner.start_s + (steps - 1) * inner.hop_s, sent_bytes / inner.bandwidth, inner.softness)
    latency = outer.start_s + (steps_between - 1) * outer.hop_s + (steps - steps_between) * inner.hop_s
    return blend_s(
        latency, sent_bytes / min(_inner_bandwidth(group, inner), group.min_per_node * outer.bandwidth), outer.softness
    )


def _inner_bandwidth(group: RankGroup, inner: _Tier) -> float:
    """The bandwidth within nodes; infinite for a group with one rank on each node, which sends nothing there."""
    return inner.bandwidth if group.per_node > 1 else float("inf")


def _tree_s(size: float, group: RankGroup, inner: _Tier, outer: _Tier | None, share: float) -> float:
    """Seconds of an all-reduce over two trees of nodes, each for half of the tensor. Within a node, ranks form a chain
    or, if switches reduce, use a multicast."""
    assert outer is not None
    between_s = (1 if group.nodes == 2 else 2) * size / (group.min_per_node * outer.bandwidth)
    depth, chain = ceil(log2(group.nodes)), group.per_node - 1
    within_s = 2 * size / _inner_bandwidth(group, inner)
    if inner.multicast and group.per_node > 2:
        chain, within_s = 1, size * (1 + 1 / group.per_node) / inner.multicast
    latency = outer.start_s + (2 * depth - 1) * outer.hop_s + 2 * chain * inner.hop_s
    return blend_s(latency, max(within_s, between_s) / share, outer.softness)


def _multicast_s(size: float, group: RankGroup, inner: _Tier) -> float:
    """Seconds of an all-reduce in the switches: every rank sends its tensor once, the switches reduce it, and every
    rank multicasts its share of the result."""
    transmission_s = size * (1 + 1 / group.ranks) / inner.multicast
    return blend_s(inner.start_s + 2 * inner.hop_s, transmission_s, inner.softness)


def _two_level_s(size: float, group: RankGroup, inner: _Tier, outer: _Tier | None, tree: float) -> float:
    within = RankGroup(ranks=group.min_per_node, per_node=group.min_per_node, min_per_node=group.min_per_node)
    between = RankGroup(ranks=group.nodes, nodes=group.nodes)
    slice_bytes = size / group.min_per_node
    between_s = min(
        _ring_s("all_reduce", slice_bytes, between, inner, outer), _tree_s(slice_bytes, between, inner, outer, tree)
    )
    within_s = _ring_s("reduce_scatter", size, within, inner, None) + _ring_s("all_gather", size, within, inner, None)
    return within_s + between_s


def _all_to_all_s(size: float, group: RankGroup, inner: _Tier, outer: _Tier | None, peer_s: float) -> float:
    """Seconds of an all-to-all, in which every rank sends to all other ranks one after another. Each message between
    nodes uses the network link of its sender's device alone."""
    within_s = (group.per_node - 1) / group.ranks * size / _inner_bandwidth(group, inner)
    latency = (outer or inner).start_s + (group.ranks - 2) * peer_s
    between_s = (group.ranks - group.min_per_node) / group.ranks * size / outer.bandwidth if outer else 0.0
    return blend_s(latency, max(within_s, between_s), (outer or inner).softness)


def _send_s(size: float, group: RankGroup, inner: _Tier, outer: _Tier | None) -> float:
    """Seconds of one message, which goes between nodes if the group spans several."""
    tier = outer or inner
    return blend_s(tier.start_s, size / tier.bandwidth, tier.softness)


def _slowest_node(cluster: Cluster) -> Node:
    """The node whose internal link is the slowest. It decides, because all other nodes wait for it."""
    several = [node for node in cluster.nodes if node.count > 1]
    return min(several or cluster.nodes, key=lambda node: node.link.bandwidth_bytes_per_s)


def _tier_within(group: RankGroup, cluster: Cluster, efficiencies: LinkEfficiencies) -> _Tier:
    node = _slowest_node(cluster)
    efficiency = efficiencies.of_link(node.link)
    link_bandwidth = _bandwidth(node.link) if group.per_node > 1 else float("inf")
    if efficiency.mesh_ring_shares and node.count == efficiency.mesh_devices:
        link_bandwidth *= efficiency.mesh_ring_shares.get(group.per_node, 1.0)
    bandwidth = link_bandwidth * efficiency.ring_share * (1 - efficiency.few_ranks_loss / max(2, group.per_node))
    if group.bridge_groups and node.link.name in efficiency.bridge_bytes_per_s:
        # If the cluster describes a link as faster than the catalog's link of that name, its bridge is assumed to be
        # faster by the same factor.
        faster = _bandwidth(node.link) / find_link(node.link.name).bandwidth_bytes_per_s
        bridge = faster * efficiency.bridge_bytes_per_s[node.link.name]
        bandwidth = min(bandwidth, bridge / group.bridge_groups)
    reduces = node.link.name in efficiency.multicast_links
    multicast = efficiency.multicast_share * link_bandwidth if reduces else 0.0
    latency_s = node.link.latency_s
    return _Tier(bandwidth, latency_s, efficiency.hop_share * latency_s, efficiency.softness, multicast)


def _tier_between(group: RankGroup, cluster: Cluster, efficiencies: LinkEfficiencies) -> _Tier | None:
    """The bandwidth and latency of the link between nodes; None for a group on one node."""
    if group.nodes == 1:
        return None
    assert cluster.link is not None
    link, efficiency = cluster.link, efficiencies.of_link(cluster.link)
    limit = efficiency.rank_limit_bytes_per_s if cluster.kind == "cpu" else float("inf")
    bandwidth = min(_bandwidth(link) * efficiency.ring_share, limit)
    return _Tier(bandwidth, link.latency_s, efficiency.hop_share * link.latency_s, efficiency.softness)


def _bandwidth(link: Link) -> float:
    if not link.bandwidth_bytes_per_s:
        raise InputError(f"link '{link.name}' has no known bandwidth: `meshwright doctor` measures it")
    return link.bandwidth_bytes_per_s


@dataclass(frozen=True)
class OverlappedTime:
    """The seconds of compute and communication that overlap. `exposed_s` is what communication adds to the time of
    compute alone."""

    total_s: float
    exposed_s: float


def overlap(compute_s: float, communication_s: float, kind: DeviceKind) -> OverlappedTime:
    """The time of compute and communication that run at the same time. The arguments are the seconds that each would
    take alone, and the kind of device."""
    if kind == "cpu":
        total = max(compute_s + CORE_SHARE * communication_s, communication_s)
    elif compute_s * COMPUTE_SLOWDOWN <= communication_s * COMMUNICATION_SLOWDOWN:
        both_s = compute_s * COMPUTE_SLOWDOWN
        total = both_s + communication_s - both_s / COMMUNICATION_SLOWDOWN
    else:
        both_s = communication_s * COMMUNICATION_SLOWDOWN
        total = both_s + compute_s - both_s / COMPUTE_SLOWDOWN
    return OverlappedTime(total, total - compute_s)

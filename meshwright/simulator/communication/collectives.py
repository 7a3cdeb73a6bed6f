"""How long a collective takes on a cluster, by the cheapest algorithm; and what of it shows beside compute.

A tensor of S bytes, n ranks, m nodes with k ranks each. Of the link within nodes (in) and between them (out): b the
bandwidth reached, h the seconds of one more hop, p the softness of the outermost one. Measured curves come first:

    curve       = what was measured for this collective, these ranks and nodes                          _measured
    blend       = (L^p + W^p)^(1/p), L latency, W the wire's seconds                                    blend
    b_in        = link × ring × (1 - few / k), at most bridge / beside                                  _within
    b_out       = link × ring, at most `most` on CPUs, a rank; a node has `fewest` of them              _between
    w           = 2 (n-1)/n all_reduce; (n-1)/n all_gather, reduce_scatter; 1 broadcast                 wire_share
    ring        : W = w S / min(b_in, fewest b_out),      L = start + steps h                           _ring
    tree        : W = max(2 S / b_in, (1 if m = 2 else 2) S / (fewest b_out)) / tree share, L = start
                  + 2 (k-1) h_in + 2 log2(m) h_out; 2 S / b_in is S (1 + 1/k) / multicast where
                  switches reduce                                                                       _tree
    multicast   : W = S (1 + 1/k) / multicast,            L = start + 2 h_in                            _multicast
    two_level   = reduce_scatter(in, S) + all_reduce(out, S / k, a rank a node) + all_gather(in, S)     _two_level
    all_to_all  : W = max((k-1)/n S / b_in, (n-k)/n S / b_out), L = start + (n-2) peer                  _all_to_all
    send        : W = S / b of the outermost tier,        L = start                                     _send
    together    = both slowed until the shorter one ends, then the rest alone                           overlap

S is the whole tensor: what every rank has after an all-gather or before a reduce-scatter, what one rank sends in all
in an all-to-all, the message of a `point_to_point`.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2
from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveFloat

from meshwright.cluster.catalog import CATALOG, find_link
from meshwright.cluster.cluster import Cluster, Collective, Kind, Link, Node
from meshwright.cluster.curves import curve_time, measured_from
from meshwright.errors import InputError
from meshwright.simulator.communication.placement import Group
from meshwright.yaml_file import read_mapping, validated

Algorithm = Literal["ring", "tree", "multicast", "two_level", "direct", "curve"]

# While both run. Compute: Lee et al. 2025 (arXiv 2507.03114), 18.9% on average over A100, H100, MI210 and MI250.
# Communication: Galvatron's overlap test finds one factor for both sides (1.3 on its machines), so it has the same.
COMPUTE_SLOWDOWN = 1.189
COMMUNICATION_SLOWDOWN = 1.189
# Of a CPU rank's core: Gloo copies and adds on the cores that compute. Assumed, until a machine says otherwise.
CORE_SHARE = 1.0


class LinkEfficiency(BaseModel):
    """What collectives reach of a family of links: the fields are described in catalog/links_reached.yaml."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    links: tuple[str, ...]
    ring: PositiveFloat
    few: float
    hop: float
    softness: PositiveFloat
    most: PositiveFloat = float("inf")
    multicast: float = 0.0
    multicast_links: tuple[str, ...] = ()
    rings_of: int = 0
    rings: dict[int, float] = {}
    bridge: dict[str, float] = {}
    sources: dict[str, str]


class Reached(BaseModel):
    """All families; the share of a ring's bandwidth that trees reach; what each further peer costs in an all-to-all,
    and each call the host, by kind of device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    families: dict[str, LinkEfficiency]
    tree: PositiveFloat
    peer_s: float
    call_s: dict[Kind, float]
    sources: dict[str, str]

    def family(self, link: Link) -> str:
        """The family whose links' names begin this one's, the longest first."""
        matches = [(len(word), name) for name, reach in self.families.items() for word in reach.links
                   if link.name.startswith(word)]  # fmt: skip
        return max(matches)[1]


@lru_cache
def reached() -> Reached:
    """The catalog's."""
    raw = read_mapping(CATALOG / "links_reached.yaml", "catalog")
    raw.pop("_shared")
    return validated(Reached, raw, "catalog: links_reached.yaml")


@dataclass(frozen=True)
class Price:
    """`based_on`: a curve measured for this very case, or the link's figures times fitted shares of them."""

    seconds: float
    algorithm: Algorithm
    based_on: Literal["measured", "fitted"]


@dataclass(frozen=True)
class _Tier:
    """A link as one rank meets it in a collective; `multicast` is 0 where switches do not reduce."""

    bandwidth: float
    start_s: float
    hop_s: float
    softness: float
    multicast: float = 0.0


def collective_s(
    kind: Collective, size_bytes: float, group: Group, cluster: Cluster, algorithm: Algorithm | None = None
) -> float:
    """Seconds on the device, by the cheapest algorithm or a given one."""
    return price(kind, size_bytes, group, cluster, algorithm).seconds


def call_s(cluster: Cluster) -> float:
    """Seconds the host needs to start one collective: hidden where the host runs ahead, else to be added."""
    return reached().call_s[cluster.kind]


def price(
    kind: Collective,
    size_bytes: float,
    group: Group,
    cluster: Cluster,
    algorithm: Algorithm | None = None,
    shares: Reached | None = None,
) -> Price:
    """The seconds with the algorithm that takes them. `shares` stand in for the catalog's."""
    if group.ranks == 1:
        return Price(0.0, "direct", "measured")
    options = _options(kind, size_bytes, group, cluster, shares or reached())
    if algorithm is None:
        seconds = _measured(kind, size_bytes, group, cluster, shares or reached(), min(options.values()))
        if seconds is not None:
            return Price(seconds, "curve", "measured")
    if algorithm is not None and algorithm not in options:
        raise InputError(
            f"{kind} has no algorithm '{algorithm}' for {group.ranks} ranks on {group.nodes} nodes of"
            f" '{cluster.name}': choose {' or '.join(options)}"
        )
    chosen: Algorithm = algorithm if algorithm else min(options, key=options.__getitem__)
    return Price(options[chosen], chosen, "fitted")


def _options(kind: Collective, size: float, group: Group, cluster: Cluster, shares: Reached) -> dict[Algorithm, float]:
    inner, outer = _within(group, cluster, shares), _between(group, cluster, shares)
    if kind == "point_to_point":
        return {"direct": _send(size, group, inner, outer)}
    if kind == "all_to_all":
        return {"direct": _all_to_all(size, group, inner, outer, shares.peer_s)}
    options: dict[Algorithm, float] = {"ring": _ring(kind, size, group, inner, outer)}
    if kind == "all_reduce" and group.nodes > 1:
        options["tree"] = _tree(size, group, inner, outer, shares.tree)
        if group.fewest > 1:
            options["two_level"] = _two_level(size, group, inner, outer, shares.tree)
    elif kind == "all_reduce" and inner.multicast:
        options["multicast"] = _multicast(size, group, inner)
    return options


def _measured(
    kind: Collective, size: float, group: Group, cluster: Cluster, shares: Reached, fitted_s: float
) -> float | None:
    """Off a curve of this shape; where switches do not reduce, a reduce-scatter or an all-gather is half of an
    all-reduce; and between CPU ranks of one machine a round of any is a round of the all-reduce of two."""
    link = cluster.link if group.nodes > 1 else _node(cluster).link
    if link is None or group.per_node != group.fewest or _node(cluster).count < _reach(link, shares).rings_of:
        return None  # unlike the nodes that the curves were measured on
    found = _on_curve(link, kind, size, group, fitted_s)
    rings_only = link.name not in _reach(link, shares).multicast_links
    if found is None and rings_only and kind in ("all_gather", "reduce_scatter"):
        both = _on_curve(link, "all_reduce", size, group, 2 * fitted_s)
        found = None if both is None else both / 2
    if found is None and cluster.kind == "cpu" and group.nodes == 1:
        rounds, part = _rounds(kind, group.ranks)
        pair = curve_time(link, "all_reduce", 2 * part * size, 2)  # two rounds of half of its tensor
        found = None if pair is None else rounds * pair / 2
    return found


def _on_curve(link: Link, kind: Collective, size: float, group: Group, fitted_s: float) -> float | None:
    """Below the sizes that were measured, no less than fitted shares say."""
    seconds = curve_time(link, kind, size, group.ranks, group.nodes)
    first = measured_from(link, kind, group.ranks, group.nodes)
    if seconds is None or first is None or size >= first:
        return seconds
    return max(seconds, min(fitted_s, curve_time(link, kind, first, group.ranks, group.nodes) or fitted_s))


def _rounds(kind: Collective, ranks: int) -> tuple[int, float]:
    """How many messages follow each other, and which part of the tensor each carries."""
    if kind == "point_to_point":
        return 1, 1.0
    if kind == "broadcast":
        return ceil(log2(ranks)), 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1), 1 / ranks


def blend(latency_s: float, wire_s: float, softness: float) -> float:
    """Between latency and bandwidth, libraries change protocols and channels with the size: the corner is round."""
    return float((latency_s**softness + wire_s**softness) ** (1 / softness))


def wire_share(kind: Collective, ranks: int) -> float:
    """Of the tensor, what each rank of a ring sends."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return 1.0 if kind in ("broadcast", "point_to_point") else (ranks - 1) / ranks


def _steps(kind: Collective, ranks: int) -> int:
    return (2 if kind == "all_reduce" else 1) * (ranks - 1)


def _ring(kind: Collective, size: float, group: Group, inner: _Tier, outer: _Tier | None) -> float:
    wire = wire_share(kind, group.ranks) * size
    steps, outside = _steps(kind, group.ranks), _steps(kind, group.nodes)
    if outer is None:
        return blend(inner.start_s + (steps - 1) * inner.hop_s, wire / inner.bandwidth, inner.softness)
    latency = outer.start_s + (outside - 1) * outer.hop_s + (steps - outside) * inner.hop_s
    return blend(latency, wire / min(_inside(group, inner), group.fewest * outer.bandwidth), outer.softness)


def _inside(group: Group, inner: _Tier) -> float:
    """A group with one rank on each node sends nothing within nodes."""
    return inner.bandwidth if group.per_node > 1 else float("inf")


def _tree(size: float, group: Group, inner: _Tier, outer: _Tier | None, share: float) -> float:
    """Two trees of nodes, each with half of the tensor; within a node a chain, or a multicast."""
    assert outer is not None
    up_and_down = (1 if group.nodes == 2 else 2) * size / (group.fewest * outer.bandwidth)
    depth, chain = ceil(log2(group.nodes)), group.per_node - 1
    within = 2 * size / _inside(group, inner)
    if inner.multicast and group.per_node > 2:
        chain, within = 1, size * (1 + 1 / group.per_node) / inner.multicast
    latency = outer.start_s + (2 * depth - 1) * outer.hop_s + 2 * chain * inner.hop_s
    return blend(latency, max(within, up_and_down) / share, outer.softness)


def _multicast(size: float, group: Group, inner: _Tier) -> float:
    """Every rank's memory sends the tensor once to be reduced, and the rank its share of the result to all."""
    wire = size * (1 + 1 / group.ranks) / inner.multicast
    return blend(inner.start_s + 2 * inner.hop_s, wire, inner.softness)


def _two_level(size: float, group: Group, inner: _Tier, outer: _Tier | None, tree: float) -> float:
    inside = Group(ranks=group.fewest, per_node=group.fewest, fewest=group.fewest)
    across = Group(ranks=group.nodes, nodes=group.nodes)
    part = size / group.fewest
    between = min(_ring("all_reduce", part, across, inner, outer), _tree(part, across, inner, outer, tree))
    within = _ring("reduce_scatter", size, inside, inner, None) + _ring("all_gather", size, inside, inner, None)
    return within + between


def _all_to_all(size: float, group: Group, inner: _Tier, outer: _Tier | None, peer_s: float) -> float:
    """Every rank to every other, started one after another; each leaves the node through its own device's link."""
    near = (group.per_node - 1) / group.ranks * size / _inside(group, inner)
    latency = (outer or inner).start_s + (group.ranks - 2) * peer_s
    far = (group.ranks - group.fewest) / group.ranks * size / outer.bandwidth if outer else 0.0
    return blend(latency, max(near, far), (outer or inner).softness)


def _send(size: float, group: Group, inner: _Tier, outer: _Tier | None) -> float:
    """Across nodes, where the group is."""
    tier = outer or inner
    return blend(tier.start_s, size / tier.bandwidth, tier.softness)


def _node(cluster: Cluster) -> Node:
    """The node with the slowest link within: the others wait for it."""
    several = [node for node in cluster.nodes if node.count > 1]
    return min(several or cluster.nodes, key=lambda node: node.link.bandwidth_bytes_per_s)


def _reach(link: Link, shares: Reached) -> LinkEfficiency:
    return shares.families[shares.family(link)]


def _within(group: Group, cluster: Cluster, shares: Reached) -> _Tier:
    node = _node(cluster)
    reach = _reach(node.link, shares)
    full = _known(node.link) if group.per_node > 1 else float("inf")
    if reach.rings and node.count == reach.rings_of:
        full *= reach.rings.get(group.per_node, 1.0)
    bandwidth = full * reach.ring * (1 - reach.few / max(2, group.per_node))
    if group.beside and node.link.name in reach.bridge:
        # A link that is said to be faster than the catalog's of its name comes with a bridge that is, too.
        faster = _known(node.link) / find_link(node.link.name).bandwidth_bytes_per_s
        bandwidth = min(bandwidth, faster * reach.bridge[node.link.name] / group.beside)
    multicast = reach.multicast * full if node.link.name in reach.multicast_links else 0.0
    return _Tier(bandwidth, node.link.latency_s, reach.hop * node.link.latency_s, reach.softness, multicast)


def _between(group: Group, cluster: Cluster, shares: Reached) -> _Tier | None:
    if group.nodes == 1:
        return None
    assert cluster.link is not None
    link, reach = cluster.link, _reach(cluster.link, shares)
    most = reach.most if cluster.kind == "cpu" else float("inf")
    return _Tier(min(_known(link) * reach.ring, most), link.latency_s, reach.hop * link.latency_s, reach.softness)


def _known(link: Link) -> float:
    if not link.bandwidth_bytes_per_s:
        raise InputError(f"link '{link.name}' has no known bandwidth: `meshwright doctor` measures it")
    return link.bandwidth_bytes_per_s


@dataclass(frozen=True)
class Overlap:
    """`exposed_s` is what communication adds to the compute."""

    total_s: float
    exposed_s: float


def overlap(compute_s: float, communication_s: float, kind: Kind) -> Overlap:
    """Compute and communication that may run side by side, given how long each takes alone."""
    if kind == "cpu":
        total = max(compute_s + CORE_SHARE * communication_s, communication_s)
    elif compute_s * COMPUTE_SLOWDOWN <= communication_s * COMMUNICATION_SLOWDOWN:
        together = compute_s * COMPUTE_SLOWDOWN
        total = together + communication_s - together / COMMUNICATION_SLOWDOWN
    else:
        together = communication_s * COMMUNICATION_SLOWDOWN
        total = together + compute_s - together / COMPUTE_SLOWDOWN
    return Overlap(total, total - compute_s)

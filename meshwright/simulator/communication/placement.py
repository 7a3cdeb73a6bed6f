"""How the axes of a plan are placed on a cluster: which links the groups of an axis use, and which groups share them.

Ranks fill the devices node by node, and the mesh numbers them with its axes outermost to innermost as in `MESH_ORDER`:

    rank           = ((pipeline × replicates + replicate) × shards + shard) × tensors + tensor      _rank_groups
    stride         = product of the axes inside of the innermost one that communicates              _group_of_axes
    nodes          = how many nodes the widest group spans; per_node, min_per_node = the most and
                     the fewest of its ranks on one of them                                         _group_of_axes
    network_groups = groups that send through one node's network at the same time                   _network_groups
    bridge_groups  = groups that use the bridge between the two halves of one node                  _bridge_groups

Every figure is that of the slowest group, because the step waits for the slowest group of an axis. The same applies to
clusters whose nodes differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan_fields.groups import MESH_ORDER, Axes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class RankGroup:
    """The ranks that take part in one collective. `stride` is the distance between neighbouring ranks of the group.
    `per_node` and `min_per_node` are the largest and the smallest number of its ranks on one node. `network_groups` is
    the number of groups of the same axis, including this one, that send through one node's network at the same time.
    `bridge_groups` is the number of groups that have ranks in both halves of a node. Both are 0 if there are none."""

    ranks: int
    stride: int = 1
    nodes: int = 1
    per_node: int = 1
    min_per_node: int = 1
    network_groups: int = 0
    bridge_groups: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """The links that the group uses: `within` a node, and the network `between` nodes."""
        used = {"within": self.per_node > 1, "between": self.nodes > 1}
        return tuple(tier for tier, is_used in used.items() if is_used)


def axis_groups(axes: Axes, cluster: Cluster) -> dict[str, RankGroup]:
    """The group of each axis of the mesh, by the name of the axis."""
    return {name: group_of_axes(axes, (name,), cluster) for name in MESH_ORDER}


def group_of_axes(axes: Axes, names: Iterable[str], cluster: Cluster) -> RankGroup:
    """The group of several axes that communicate as one: for example, gradients over `("replicate", "shard")`."""
    sizes = tuple(getattr(axes, name) for name in MESH_ORDER)
    if prod(sizes) > cluster.device_count:
        product = " × ".join(f"{name}({size})" for name, size in zip(MESH_ORDER, sizes, strict=True) if size > 1)
        raise InputError(
            f"{product} = {prod(sizes)} ranks, but the cluster '{cluster.name}' has {cluster.device_count} devices:"
            f" choose axes whose product is at most {cluster.device_count}"
        )
    counts = tuple((node.count, node.number) for node in cluster.nodes)
    return _group_of_axes(
        sizes, tuple(MESH_ORDER.index(name) for name in sorted(set(names), key=MESH_ORDER.index)), counts
    )


def neighbour_groups(axes: Axes, cluster: Cluster) -> tuple[RankGroup, ...]:
    """For each rank of a pipeline, the group that consists of this rank and the next rank (for the last rank, the
    first). The group spans two nodes if any pipeline of the mesh has this pair on two nodes."""
    sizes = tuple(getattr(axes, name) for name in MESH_ORDER)
    counts = tuple((node.count, node.number) for node in cluster.nodes)
    return _neighbour_groups(sizes, MESH_ORDER.index("pipeline"), counts)


@lru_cache(maxsize=4096)
def _neighbour_groups(sizes: tuple[int, ...], axis: int, counts: tuple[tuple[int, int], ...]) -> tuple[RankGroup, ...]:
    groups = _rank_groups(sizes, (axis,))
    node_of, local, count_of = _devices(counts, groups.size)
    pair_groups = []
    for rank in range(groups.shape[1]):
        pairs = groups[:, [rank, (rank + 1) % groups.shape[1]]]
        if (node_of[pairs[:, 0]] != node_of[pairs[:, 1]]).any():
            pair_groups.append(RankGroup(2, nodes=2))
        else:
            pair_groups.append(
                RankGroup(
                    2, per_node=2, min_per_node=2, bridge_groups=_bridge_groups(pairs, node_of, 2 * local >= count_of)
                )
            )
    return tuple(pair_groups)


@lru_cache(maxsize=4096)
def _group_of_axes(sizes: tuple[int, ...], axes: tuple[int, ...], counts: tuple[tuple[int, int], ...]) -> RankGroup:
    inside = [axis for axis in axes if sizes[axis] > 1]
    if not inside:
        return RankGroup(ranks=1)
    stride = prod(sizes[inside[-1] + 1 :])
    groups = _rank_groups(sizes, axes)
    node_of, local, count_of = _devices(counts, groups.size)
    nodes = np.sort(node_of[groups], axis=1)
    firsts = np.concatenate([np.ones((len(nodes), 1), dtype=bool), nodes[:, 1:] != nodes[:, :-1]], axis=1)
    reached = firsts.sum(axis=1)
    runs = np.diff(np.append(np.flatnonzero(firsts), nodes.size))
    of_widest = np.repeat(reached, reached) == reached.max()
    return RankGroup(
        ranks=int(groups.shape[1]),
        stride=stride,
        nodes=int(reached.max()),
        per_node=int(runs[of_widest].max()),
        min_per_node=int(runs[of_widest].min()),
        network_groups=_network_groups(nodes, firsts, reached),
        bridge_groups=_bridge_groups(groups, node_of, 2 * local >= count_of),
    )


def _rank_groups(sizes: tuple[int, ...], axes: tuple[int, ...]) -> Ints:
    """The ranks of each group, as an array with one row per group."""
    grid = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    last = range(len(sizes) - len(axes), len(sizes))
    return np.moveaxis(grid, axes, tuple(last)).reshape(-1, prod(sizes[axis] for axis in axes))


def _devices(counts: tuple[tuple[int, int], ...], ranks: int) -> tuple[Ints, Ints, Ints]:
    """For each rank: its node, its index on that node, and the number of devices of the node."""
    per_node = np.array([count for count, number in counts for _ in range(number)], dtype=np.int64)
    node_of = np.repeat(np.arange(len(per_node)), per_node)[:ranks]
    starts = np.cumsum(per_node) - per_node
    return node_of, np.arange(ranks) - starts[node_of], per_node[node_of]


def _network_groups(nodes: Ints, firsts: npt.NDArray[np.bool_], reached: Ints) -> int:
    leaving = nodes[reached > 1][firsts[reached > 1]]
    return int(np.bincount(leaving).max()) if leaving.size else 0


def _bridge_groups(groups: Ints, node_of: Ints, is_upper: npt.NDArray[np.bool_]) -> int:
    """The number of groups with ranks in both halves of a node, on the node that has most such groups."""
    rows = np.repeat(np.arange(len(groups)), groups.shape[1])
    ranks = groups.ravel()
    keys = rows * (int(node_of.max()) + 1) + node_of[ranks]
    both = np.intersect1d(keys[is_upper[ranks]], keys[~is_upper[ranks]])
    return int(np.bincount(both % (int(node_of.max()) + 1)).max()) if both.size else 0

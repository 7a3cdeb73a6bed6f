"""How a plan's axes lie on a cluster: which links the groups of an axis cross, and who shares them.

Ranks fill the devices node by node, and the mesh numbers them with its axes outermost to innermost as in `MESH_ORDER`:

    rank   = ((pipeline × replicates + replicate) × shards + shard) × tensors + tensor      _groups
    stride = product of the axes inside of the innermost one that communicates               place
    nodes  = how many nodes the widest group reaches; per_node, fewest = its members on one  place
    sharing = groups that send through one node's network at the same time                   _sharing
    beside = groups that meet on the bridge between the two halves of one node               _beside

Every figure is that of the worst group: a collective is as slow as its slowest group, and so are nodes that differ.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np
import numpy.typing as npt

from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError
from meshwright.plan import MESH_ORDER, Axes

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Group:
    """The ranks that take part in one collective. `per_node` and `fewest` are the most and the least of them that
    share a node; `sharing` counts the like groups that leave one node through its network at the same time, this one
    among them, and `beside` those that cross from one half of a node to the other. Both are 0 where none does."""

    ranks: int
    stride: int = 1
    nodes: int = 1
    per_node: int = 1
    fewest: int = 1
    sharing: int = 0
    beside: int = 0

    @property
    def tiers(self) -> tuple[str, ...]:
        """What it crosses: links `within` a node, the network `between` nodes."""
        crossed = {"within": self.per_node > 1, "between": self.nodes > 1}
        return tuple(tier for tier, is_crossed in crossed.items() if is_crossed)


def place(axes: Axes, cluster: Cluster) -> dict[str, Group]:
    """The group of every axis."""
    return {name: group(axes, (name,), cluster) for name in MESH_ORDER}


def group(axes: Axes, names: Iterable[str], cluster: Cluster) -> Group:
    """The group of several axes that communicate as one: gradients are combined over `("replicate", "shard")`."""
    sizes = tuple(getattr(axes, name) for name in MESH_ORDER)
    if prod(sizes) > cluster.devices:
        told = " × ".join(f"{name}({size})" for name, size in zip(MESH_ORDER, sizes, strict=True) if size > 1)
        raise InputError(
            f"{told} = {prod(sizes)} ranks, but the cluster '{cluster.name}' has {cluster.devices} devices:"
            f" choose axes whose product is at most {cluster.devices}"
        )
    counts = tuple((node.count, node.number) for node in cluster.nodes)
    return _place(sizes, tuple(MESH_ORDER.index(name) for name in sorted(set(names), key=MESH_ORDER.index)), counts)


def neighbours(axes: Axes, cluster: Cluster) -> tuple[Group, ...]:
    """Every rank of a pipeline with the one behind it, the last with the first. Across nodes where any such two are."""
    sizes = tuple(getattr(axes, name) for name in MESH_ORDER)
    counts = tuple((node.count, node.number) for node in cluster.nodes)
    return _neighbours(sizes, MESH_ORDER.index("pipeline"), counts)


@lru_cache(maxsize=4096)
def _neighbours(sizes: tuple[int, ...], axis: int, counts: tuple[tuple[int, int], ...]) -> tuple[Group, ...]:
    groups = _groups(sizes, (axis,))
    node_of, local, count_of = _devices(counts, groups.size)
    found = []
    for rank in range(groups.shape[1]):
        pairs = groups[:, [rank, (rank + 1) % groups.shape[1]]]
        if (node_of[pairs[:, 0]] != node_of[pairs[:, 1]]).any():
            found.append(Group(2, nodes=2))
        else:
            found.append(Group(2, per_node=2, fewest=2, beside=_beside(pairs, node_of, 2 * local >= count_of)))
    return tuple(found)


@lru_cache(maxsize=4096)
def _place(sizes: tuple[int, ...], chosen: tuple[int, ...], counts: tuple[tuple[int, int], ...]) -> Group:
    inside = [axis for axis in chosen if sizes[axis] > 1]
    if not inside:
        return Group(ranks=1)
    stride = prod(sizes[inside[-1] + 1 :])
    groups = _groups(sizes, chosen)
    node_of, local, count_of = _devices(counts, groups.size)
    nodes = np.sort(node_of[groups], axis=1)
    firsts = np.concatenate([np.ones((len(nodes), 1), dtype=bool), nodes[:, 1:] != nodes[:, :-1]], axis=1)
    reached = firsts.sum(axis=1)
    runs = np.diff(np.append(np.flatnonzero(firsts), nodes.size))
    of_widest = np.repeat(reached, reached) == reached.max()
    return Group(
        ranks=int(groups.shape[1]),
        stride=stride,
        nodes=int(reached.max()),
        per_node=int(runs[of_widest].max()),
        fewest=int(runs[of_widest].min()),
        sharing=_sharing(nodes, firsts, reached),
        beside=_beside(groups, node_of, 2 * local >= count_of),
    )


def _groups(sizes: tuple[int, ...], chosen: tuple[int, ...]) -> Ints:
    """One row of ranks for each group."""
    grid = np.arange(prod(sizes), dtype=np.int64).reshape(sizes)
    last = range(len(sizes) - len(chosen), len(sizes))
    return np.moveaxis(grid, chosen, tuple(last)).reshape(-1, prod(sizes[axis] for axis in chosen))


def _devices(counts: tuple[tuple[int, int], ...], ranks: int) -> tuple[Ints, Ints, Ints]:
    """Of each rank: its node, its place on that node, and how many devices the node has."""
    per_node = np.array([count for count, number in counts for _ in range(number)], dtype=np.int64)
    node_of = np.repeat(np.arange(len(per_node)), per_node)[:ranks]
    starts = np.cumsum(per_node) - per_node
    return node_of, np.arange(ranks) - starts[node_of], per_node[node_of]


def _sharing(nodes: Ints, firsts: npt.NDArray[np.bool_], reached: Ints) -> int:
    leaving = nodes[reached > 1][firsts[reached > 1]]
    return int(np.bincount(leaving).max()) if leaving.size else 0


def _beside(groups: Ints, node_of: Ints, is_upper: npt.NDArray[np.bool_]) -> int:
    """Groups with members in both halves of a node, on the node that has most of them."""
    rows = np.repeat(np.arange(len(groups)), groups.shape[1])
    ranks = groups.ravel()
    keys = rows * (int(node_of.max()) + 1) + node_of[ranks]
    both = np.intersect1d(keys[is_upper[ranks]], keys[~is_upper[ranks]])
    return int(np.bincount(both % (int(node_of.max()) + 1)).max()) if both.size else 0

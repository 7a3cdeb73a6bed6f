"""Two levels: the ranks of a node first sum among themselves, so that each chunk leaves the node only once.

Reduce-scatter within each node (a ring), all-reduce of each chunk among the ranks that hold it, one per node, and
all-gather within each node. With m nodes, each node sends 2(m - 1)/m of the tensor in total, spread over its ranks. A
ring over all ranks sends nearly the same across nodes, but through one rank of each node and in 2(n - 1) rounds.

Nodes may have different numbers of ranks: the tensor is cut into so many parts that each node can divide it evenly.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm

from meshwright.collectives.schedules.halving_doubling import halving_doubling
from meshwright.collectives.schedules.ring import all_gather, reduce_scatter, ring
from meshwright.collectives.schedules.schedule import Schedule, placed, side_by_side

# Nodes of 7, 8 and 9 ranks would need 504 parts. Above this limit shares are only nearly even.
MOST_PARTS = 64


def two_level(ranks_per_node: Sequence[int]) -> Schedule:
    """Returns the schedule for nodes with these numbers of ranks. The ranks of a node are consecutive."""
    if not ranks_per_node or min(ranks_per_node) < 1:
        raise ValueError(f"two-level: nodes of {list(ranks_per_node)} ranks: each must have at least one")
    nodes, first = [], 0
    for count in ranks_per_node:
        nodes.append(range(first, first + count))
        first += count
    across = across_nodes(len(nodes))
    parts = lcm(*ranks_per_node) if lcm(*ranks_per_node) <= MOST_PARTS else max(ranks_per_node)
    shares = [_shares(parts, len(node)) for node in nodes]
    chunks = [
        [range(share.start * across.chunks, share.stop * across.chunks) for share in node_shares]
        for node_shares in shares
    ]
    holders = [
        [node[_holder(part, node_shares)] for node, node_shares in zip(nodes, shares, strict=True)]
        for part in range(parts)
    ]
    rounds = [
        *side_by_side(*(reduce_scatter(node, groups) for node, groups in zip(nodes, chunks, strict=True))),
        *side_by_side(
            *(placed(across, part_holders, part * across.chunks) for part, part_holders in enumerate(holders))
        ),
        *side_by_side(*(all_gather(node, groups) for node, groups in zip(nodes, chunks, strict=True))),
    ]
    return Schedule("two-level", first, parts * across.chunks, tuple(rounds))


def across_nodes(nodes: int) -> Schedule:
    """Returns the all-reduce between nodes. Halving and doubling sends as few bytes as a ring in fewer rounds, if the
    number of nodes is a power of two."""
    return halving_doubling(nodes) if nodes & (nodes - 1) == 0 else ring(nodes)


def _shares(parts: int, ranks: int) -> list[range]:
    cuts = [rank * parts // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _holder(part: int, shares: Sequence[range]) -> int:
    return next(index for index, share in enumerate(shares) if part in share)

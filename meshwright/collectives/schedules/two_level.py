"""Two levels: the ranks of a node first sum among themselves, so that only the node's sum is sent to other nodes.

In this order: a reduce-scatter within each node (a ring), an all-reduce of each part of the tensor among the ranks that
then have its sum (one rank per node), and an all-gather within each node. With m nodes, each node sends 2(m - 1)/m of
the tensor to other nodes in total, spread over its ranks. A ring over all n ranks sends nearly as many bytes between
nodes, but through one rank of each node and in 2(n - 1) rounds.

Nodes may have different numbers of ranks. The number of parts is therefore a multiple of each node's number of ranks,
up to `MOST_PARTS`.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm

from meshwright.collectives.schedules.halving_doubling import halving_doubling
from meshwright.collectives.schedules.ring import all_gather, reduce_scatter, ring
from meshwright.collectives.schedules.schedule import Schedule, placed, side_by_side

# Nodes of 7, 8 and 9 ranks would need 504 parts. If more parts than this were needed, there are as many parts as the
# largest node has ranks, and the ranks of smaller nodes get unequal numbers of parts.
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
    """Returns the all-reduce between nodes, with one rank for each node: halving and doubling if their number is a
    power of two, because it then sends as few bytes as a ring in fewer rounds, and a ring otherwise."""
    return halving_doubling(nodes) if nodes & (nodes - 1) == 0 else ring(nodes)


def _shares(parts: int, ranks: int) -> list[range]:
    cuts = [rank * parts // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _holder(part: int, shares: Sequence[range]) -> int:
    return next(index for index, share in enumerate(shares) if part in share)

"""Two levels: the ranks of a node first sum among themselves, so that only one share of each chunk leaves the node.

Reduce-scatter within each node (a ring), all-reduce of each chunk among the ranks that hold it, one a node, and
all-gather within each node. Each node sends 2(m - 1)/m of the tensor in all for m nodes, spread over its ranks; a ring
over all ranks sends nearly the same across nodes, but through one rank of each node and in 2(n - 1) rounds.

Nodes may have different numbers of ranks: the tensor is cut so finely that each node can share it out evenly.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import lcm

from meshwright.collectives.schedules.halving_doubling import halving_doubling
from meshwright.collectives.schedules.ring import all_gather, reduce_scatter, ring
from meshwright.collectives.schedules.schedule import Schedule, placed, side_by_side

# Nodes of 7, 8 and 9 ranks would want 504 parts: from here on shares are only nearly even.
MOST_PARTS = 64


def two_level(tiers: Sequence[int]) -> Schedule:
    """`tiers`: how many ranks each node has; those of a node follow one another."""
    if not tiers or min(tiers) < 1:
        raise ValueError(f"two-level: nodes of {list(tiers)} ranks: each must have one at least")
    nodes, first = [], 0
    for count in tiers:
        nodes.append(range(first, first + count))
        first += count
    across = across_nodes(len(nodes))
    parts = lcm(*tiers) if lcm(*tiers) <= MOST_PARTS else max(tiers)
    shares = [_shares(parts, len(node)) for node in nodes]
    chunks = [
        [range(share.start * across.chunks, share.stop * across.chunks) for share in of_node] for of_node in shares
    ]
    holders = [
        [node[_place(part, of_node)] for node, of_node in zip(nodes, shares, strict=True)] for part in range(parts)
    ]
    rounds = [
        *side_by_side(*(reduce_scatter(node, groups) for node, groups in zip(nodes, chunks, strict=True))),
        *side_by_side(*(placed(across, held_by, part * across.chunks) for part, held_by in enumerate(holders))),
        *side_by_side(*(all_gather(node, groups) for node, groups in zip(nodes, chunks, strict=True))),
    ]
    return Schedule("two-level", first, parts * across.chunks, tuple(rounds))


def across_nodes(nodes: int) -> Schedule:
    """Halving-doubling sends as few bytes as a ring in fewer rounds, where nobody needs to be folded in."""
    return halving_doubling(nodes) if nodes & (nodes - 1) == 0 else ring(nodes)


def _shares(parts: int, ranks: int) -> list[range]:
    cuts = [rank * parts // ranks for rank in range(ranks + 1)]
    return [range(begin, end) for begin, end in pairwise(cuts)]


def _place(part: int, shares: Sequence[range]) -> int:
    return next(place for place, share in enumerate(shares) if part in share)

"""Trees: sums are sent up to a root and the total is sent down, in about 4 log2(n) rounds of long messages (n ranks).

The tree is the binary search tree over the ranks in their order. With ranks numbered from 1, odd ranks are leaves, and
the height of a rank is the position of its lowest set bit. In a single tree the leaves send only half of the time.
Therefore `double_tree` uses two trees, each for half of the tensor. The second tree is the first one mirrored (even
number of ranks) or shifted by one (odd number), and thereby the leaves of one tree are the inner ranks of the other.
For an odd number of ranks, rank 0 is a leaf of both, because a binary tree has one leaf more than inner ranks. (These
are the two trees of Sanders, Speck and Träff, 2009, which NCCL uses too.)
"""

from meshwright.collectives.schedules.schedule import Round, Schedule, Send, placed, side_by_side


def tree(ranks: int) -> Schedule:
    up = _upwards(ranks)
    down = [tuple(Send(s.target, s.source, s.chunk, "copy") for s in sends) for sends in reversed(up)]
    return Schedule("tree", ranks, 1, (*up, *down))


def double_tree(ranks: int) -> Schedule:
    single = tree(ranks)
    second = range(ranks - 1, -1, -1) if ranks % 2 == 0 else [(rank + 1) % ranks for rank in range(ranks)]
    rounds = side_by_side(placed(single, range(ranks), 0), placed(single, second, 1))
    return Schedule("double tree", ranks, 2, tuple(rounds))


def parent(rank: int, ranks: int) -> int | None:
    """Returns the parent of a rank in the tree of `ranks` ranks; None for the root."""
    position = rank + 1
    bit = position & -position
    above = (position ^ bit) | (bit << 1)
    if above > ranks:
        above = position ^ bit
    return above - 1 if above else None


def _upwards(ranks: int) -> list[Round]:
    """Returns the rounds that send sums towards the root. Each rank sends as soon as it has the sums of its children; a
    parent receives from its two children in different rounds."""
    children: list[list[int]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        above = parent(rank, ranks)
        if above is not None:
            children[above].append(rank)
    rounds: dict[int, list[Send]] = {}

    def first_send_round(rank: int) -> int:
        """Returns the first round in which this rank can send, after scheduling the sends of its children."""
        earliest = 0
        for begin, child in sorted((first_send_round(child), child) for child in children[rank]):
            number = max(begin, earliest)
            rounds.setdefault(number, []).append(Send(child, rank, 0, "add"))
            earliest = number + 1
        return earliest

    root = next(rank for rank in range(ranks) if parent(rank, ranks) is None)
    first_send_round(root)
    return [tuple(rounds[number]) for number in sorted(rounds)]

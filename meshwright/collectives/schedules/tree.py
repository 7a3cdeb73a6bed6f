"""Trees: sums travel up to a root and the total travels down, in about 4 log2(n) rounds of long messages.

The tree is the binary one over ranks in their order: counted from 1, odd ones are leaves, and the height of a rank is
the lowest bit that is set. In one tree the leaves only send half of the time. So `double_tree` uses two, each with half
of the tensor: the second one is the first one mirrored (an even number of ranks) or moved on by one (an odd number), so
that the leaves of one are the inner ranks of the other. For an odd number rank 0 is a leaf of both, since a binary tree
has one leaf more than inner ranks. (The two trees of Sanders, Speck and Träff, 2009, which NCCL uses too.)
"""

from meshwright.collectives.schedules.schedule import Round, Schedule, Send, placed, side_by_side


def tree(ranks: int) -> Schedule:
    up = _upwards(ranks)
    down = [tuple(Send(s.target, s.source, s.chunk, "copy") for s in sends) for sends in reversed(up)]
    return Schedule("tree", ranks, 1, (*up, *down))


def double_tree(ranks: int) -> Schedule:
    one = tree(ranks)
    other = range(ranks - 1, -1, -1) if ranks % 2 == 0 else [(place + 1) % ranks for place in range(ranks)]
    rounds = side_by_side(placed(one, range(ranks), 0), placed(one, other, 1))
    return Schedule("double tree", ranks, 2, tuple(rounds))


def parent(rank: int, ranks: int) -> int | None:
    """None for the root."""
    place = rank + 1
    bit = place & -place
    above = (place ^ bit) | (bit << 1)
    if above > ranks:
        above = place ^ bit
    return above - 1 if above else None


def _upwards(ranks: int) -> list[Round]:
    """Each rank sends as soon as its children's sums are in; a parent of two takes them one after the other."""
    children: list[list[int]] = [[] for _ in range(ranks)]
    for rank in range(ranks):
        above = parent(rank, ranks)
        if above is not None:
            children[above].append(rank)
    rounds: dict[int, list[Send]] = {}

    def ready(rank: int) -> int:
        """The first round in which this rank can send."""
        earliest = 0
        for begin, child in sorted((ready(child), child) for child in children[rank]):
            number = max(begin, earliest)
            rounds.setdefault(number, []).append(Send(child, rank, 0, "add"))
            earliest = number + 1
        return earliest

    root = next(rank for rank in range(ranks) if parent(rank, ranks) is None)
    ready(root)
    return [tuple(rounds[number]) for number in sorted(rounds)]

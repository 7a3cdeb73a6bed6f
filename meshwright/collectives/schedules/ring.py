"""The ring: each rank talks to its neighbors only, and every link carries the same bytes in every round.

Reduce-scatter: in n - 1 rounds a group of chunks travels around the ring and gathers every rank's share; rank i ends
with group i complete. All-gather: in n - 1 more rounds the complete ones travel around. A rank sends 2(n - 1)/n of the
tensor, the least possible; the price is 2(n - 1) messages one after another.
"""

from collections.abc import Sequence

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, Send


def ring(ranks: int) -> Schedule:
    everyone = range(ranks)
    groups = [range(rank, rank + 1) for rank in everyone]
    return Schedule("ring", ranks, ranks, (*reduce_scatter(everyone, groups), *all_gather(everyone, groups)))


def reduce_scatter(ranks: Sequence[int], groups: Sequence[range]) -> list[Round]:
    """Ends with the sum of the chunks `groups[i]` on `ranks[i]`."""
    return [_round(ranks, groups, -1 - number, "add") for number in range(len(ranks) - 1)]


def all_gather(ranks: Sequence[int], groups: Sequence[range]) -> list[Round]:
    """Begins where `reduce_scatter` ends, and gives every rank all chunks."""
    return [_round(ranks, groups, -number, "copy") for number in range(len(ranks) - 1)]


def _round(ranks: Sequence[int], groups: Sequence[range], shift: int, operation: Operation) -> Round:
    """The rank at place i hands group i + shift to the next one."""
    n = len(ranks)
    return tuple(
        Send(ranks[place], ranks[(place + 1) % n], chunk, operation)
        for place in range(n)
        for chunk in groups[(place + shift) % n]
    )

"""The ring, an all-reduce of n ranks: each rank sends only to the next rank, and every link carries equally many bytes
in every round.

Reduce-scatter: in n - 1 rounds each group of chunks is passed around the ring, and every rank adds its values to it;
rank i ends with the sum of group i. All-gather: in n - 1 more rounds the sums are passed around. A rank sends 2(n -
1)/n of the tensor, the least possible, in 2(n - 1) rounds.
"""

from collections.abc import Sequence

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, Send


def ring(ranks: int) -> Schedule:
    all_ranks = range(ranks)
    groups = [range(rank, rank + 1) for rank in all_ranks]
    return Schedule("ring", ranks, ranks, (*reduce_scatter(all_ranks, groups), *all_gather(all_ranks, groups)))


def reduce_scatter(ranks: Sequence[int], groups: Sequence[range]) -> list[Round]:
    """Returns the rounds after which `ranks[i]` has the sum, over all of `ranks`, of the chunks in `groups[i]`."""
    return [_round(ranks, groups, -1 - number, "add") for number in range(len(ranks) - 1)]


def all_gather(ranks: Sequence[int], groups: Sequence[range]) -> list[Round]:
    """Returns the rounds that begin where `reduce_scatter` ends and give every rank the sums of all chunks."""
    return [_round(ranks, groups, -number, "copy") for number in range(len(ranks) - 1)]


def _round(ranks: Sequence[int], groups: Sequence[range], shift: int, operation: Operation) -> Round:
    """Returns the round in which the rank at index i sends the chunks of group i + shift to the next rank."""
    n = len(ranks)
    return tuple(
        Send(ranks[index], ranks[(index + 1) % n], chunk, operation)
        for index in range(n)
        for chunk in groups[(index + shift) % n]
    )

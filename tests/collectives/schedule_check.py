"""Checks for tests that a schedule is an all-reduce, and computes what it costs, by following every chunk through its
rounds without any tensor."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.collectives.schedules.schedule import Schedule, bounds


def check_all_reduce(schedule: Schedule) -> None:
    """Raises unless every rank ends with the tensor of each rank added exactly once in each chunk."""
    # Ranks that are part of the sum, and those that are part of it more than once, as one bit per rank.
    present = {(rank, chunk): 1 << rank for rank in range(schedule.ranks) for chunk in range(schedule.chunks)}
    repeated = dict.fromkeys(present, 0)
    for sends in schedule.rounds:
        for send in sends:  # in any order, since no send of a round reads what another one writes
            source, target = (send.source, send.chunk), (send.target, send.chunk)
            if send.operation == "copy":
                present[target], repeated[target] = present[source], repeated[source]
            else:
                repeated[target] |= repeated[source] | (present[source] & present[target])
                present[target] |= present[source]
    all_ranks = (1 << schedule.ranks) - 1
    for (rank, chunk), summed in present.items():
        missing, doubled = _ranks(all_ranks & ~summed), _ranks(repeated[rank, chunk])
        if missing or doubled:
            problems = [f"lacks the shares of ranks {missing}"] if missing else []
            problems += [f"has the shares of ranks {doubled} more than once"] if doubled else []
            raise ValueError(f"{schedule.name}: rank {rank} ends with a chunk {chunk} that {' and '.join(problems)}")


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


@dataclass(frozen=True)
class ScheduleCost:
    """The rounds and bytes that a schedule takes for a tensor of some size."""

    rounds: int
    link_bytes: Mapping[tuple[int, int], int]  # in total, by (source, target)
    within_bytes: tuple[int, ...]  # that each rank sends to ranks of the same node
    across_bytes: tuple[int, ...]  # that each rank sends to ranks of other nodes
    longest_chain: int  # number of messages of which each waits for the one before it


def schedule_cost(schedule: Schedule, size_bytes: int, node_of: Sequence[int]) -> ScheduleCost:
    """Returns the cost of the schedule; `node_of[rank]` is the node of a rank."""
    lengths = [end - begin for begin, end in bounds(schedule, size_bytes)]
    links: Counter[tuple[int, int]] = Counter()
    chain: Counter[tuple[int, int]] = Counter()  # number of consecutive messages that a rank's chunk depends on
    longest = 0
    for sends in schedule.rounds:
        for send in sends:
            if lengths[send.chunk] == 0:
                continue
            source, target = (send.source, send.chunk), (send.target, send.chunk)
            links[send.source, send.target] += lengths[send.chunk]
            messages = chain[source] + 1
            chain[target] = messages if send.operation == "copy" else max(messages, chain[target])
            longest = max(longest, messages)
    within, across = [0] * schedule.ranks, [0] * schedule.ranks
    for (sender, receiver), sent in links.items():
        (within if node_of[sender] == node_of[receiver] else across)[sender] += sent
    return ScheduleCost(len(schedule.rounds), dict(links), tuple(within), tuple(across), longest)

"""Is a schedule an all-reduce, and what does it cost? Both on paper, by following every chunk through its rounds."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshwright.collectives.schedules.schedule import Schedule, bounds


def check(schedule: Schedule) -> None:
    """Raises unless every rank ends with exactly one share of each rank in each chunk."""
    # Ranks whose share is in there, and those whose share is in there more than once: a bit a rank.
    present = {(rank, chunk): 1 << rank for rank in range(schedule.ranks) for chunk in range(schedule.chunks)}
    repeated = dict.fromkeys(present, 0)
    for sends in schedule.rounds:
        for send in sends:  # in any order, since none of a round reads what another one writes
            source, target = (send.source, send.chunk), (send.target, send.chunk)
            if send.operation == "copy":
                present[target], repeated[target] = present[source], repeated[source]
            else:
                repeated[target] |= repeated[source] | (present[source] & present[target])
                present[target] |= present[source]
    everyone = (1 << schedule.ranks) - 1
    for (rank, chunk), found in present.items():
        missing, doubled = _ranks(everyone & ~found), _ranks(repeated[rank, chunk])
        if missing or doubled:
            wrong = [f"lacks the shares of ranks {missing}"] if missing else []
            wrong += [f"has the shares of ranks {doubled} more than once"] if doubled else []
            raise ValueError(f"{schedule.name}: rank {rank} ends with a chunk {chunk} that {' and '.join(wrong)}")


def _ranks(bits: int) -> list[int]:
    return [rank for rank in range(bits.bit_length()) if bits >> rank & 1]


@dataclass(frozen=True)
class Cost:
    """What a schedule does with a tensor of some size."""

    rounds: int
    link_bytes: Mapping[tuple[int, int], int]  # from source to target, in all
    within_bytes: tuple[int, ...]  # that each rank sends to ranks of its node
    across_bytes: tuple[int, ...]  # and to ranks of others
    longest_chain: int  # messages of which each waits for the one before it


def cost(schedule: Schedule, size_bytes: int, node_of: Sequence[int]) -> Cost:
    """`node_of[rank]`: on which node it is."""
    lengths = [end - begin for begin, end in bounds(schedule, size_bytes)]
    links: Counter[tuple[int, int]] = Counter()
    chain: Counter[tuple[int, int]] = Counter()  # how many messages the value of a rank's chunk has waited for
    longest = 0
    for sends in schedule.rounds:
        for send in sends:
            if lengths[send.chunk] == 0:
                continue
            source, target = (send.source, send.chunk), (send.target, send.chunk)
            links[send.source, send.target] += lengths[send.chunk]
            arrived = chain[source] + 1
            chain[target] = arrived if send.operation == "copy" else max(arrived, chain[target])
            longest = max(longest, arrived)
    within, across = [0] * schedule.ranks, [0] * schedule.ranks
    for (sender, receiver), sent in links.items():
        (within if node_of[sender] == node_of[receiver] else across)[sender] += sent
    return Cost(len(schedule.rounds), dict(links), tuple(within), tuple(across), longest)

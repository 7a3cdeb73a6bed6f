"""`Schedule`: how ranks combine a tensor, as plain data without torch. `execute.py` runs it, the simulator prices it,
and tests prove that it computes the sum.

A tensor is cut into chunks, and rounds of sends move them. A send reads one chunk of its source and writes the same
chunk of its target: `add` adds to it, `copy` replaces it. Within a round a rank's chunk is written at most once, and no
chunk is both read and written, so the result does not depend on the order of the sends. A rank that adds the chunks of
two others takes two rounds, which also fixes the order of the sum, and so its bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Operation = Literal["copy", "add"]


@dataclass(frozen=True, slots=True)
class Send:
    """One chunk that `source` sends to `target`."""

    source: int
    target: int
    chunk: int
    operation: Operation


Round = tuple[Send, ...]


@dataclass(frozen=True)
class Schedule:
    """Rounds of sends between the ranks 0 to `ranks` - 1 of a process group."""

    name: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(
                f"{self.name}: {self.ranks} ranks and {self.chunks} chunks: there must be at least one of each"
            )
        for number, sends in enumerate(self.rounds):
            try:
                _check_round(sends, self.ranks, self.chunks)
            except ValueError as error:
                raise ValueError(f"{self.name}, round {number}: {error}") from None


def _check_round(sends: Round, ranks: int, chunks: int) -> None:
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()
    for send in sends:
        if not (0 <= send.source < ranks and 0 <= send.target < ranks):
            raise ValueError(f"{send} is outside of the ranks 0 to {ranks - 1}")
        if not 0 <= send.chunk < chunks:
            raise ValueError(f"{send} is outside of the chunks 0 to {chunks - 1}")
        if send.source == send.target:
            raise ValueError(f"{send} goes from a rank to itself")
        if send.operation not in ("copy", "add"):
            raise ValueError(f"{send} has an operation other than copy and add")
        target = (send.target, send.chunk)
        if target in written:
            raise ValueError(f"chunk {send.chunk} of rank {send.target} is written twice: use two rounds")
        written.add(target)
        read.add((send.source, send.chunk))
    for rank, chunk in sorted(read & written):
        raise ValueError(f"chunk {chunk} of rank {rank} is read and written: use two rounds")


def bounds(schedule: Schedule, size: int) -> list[tuple[int, int]]:
    """Returns where each chunk of a tensor of `size` elements begins and ends. Lengths differ by one element at most,
    and the longer chunks are spread evenly. Some chunks are empty where there are fewer elements than chunks."""
    cuts = [chunk * size // schedule.chunks for chunk in range(schedule.chunks + 1)]
    return list(pairwise(cuts))


def side_by_side(*parts: Iterable[Round]) -> list[Round]:
    """Returns rounds that run several lists of rounds at the same time, all from the beginning. They must use different
    chunks or ranks."""
    lists = [list(part) for part in parts]
    length = max((len(rounds) for rounds in lists), default=0)
    return [tuple(send for rounds in lists for send in (rounds[r] if r < len(rounds) else ())) for r in range(length)]


def placed(schedule: Schedule, ranks: Iterable[int], first_chunk: int) -> list[Round]:
    """Returns the rounds of a schedule that runs among some `ranks` of a larger group, on chunks from `first_chunk`
    on."""
    group_ranks = list(ranks)
    return [
        tuple(Send(group_ranks[s.source], group_ranks[s.target], first_chunk + s.chunk, s.operation) for s in sends)
        for sends in schedule.rounds
    ]

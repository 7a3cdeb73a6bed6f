"""`Schedule`: how ranks combine a tensor, as plain data without torch. `execute.py` runs it, the simulator prices it,
and tests prove that it computes the sum.

A tensor is cut into chunks, and rounds of sends move them. A send reads one chunk of its source and writes the same
chunk of its target: `add` adds to the target's chunk, `copy` replaces it. Within a round each chunk of a rank is
written at most once, and none is both read and written; therefore the result does not depend on the order of the sends.
A rank that adds the chunks of two other ranks needs two rounds, which fixes the order of additions and thereby the bits
of the sum.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Operation = Literal["copy", "add"]


@dataclass(frozen=True, slots=True)
class Send:
    """Rank `source` sends one chunk to rank `target`, which adds it to its own chunk or replaces that by it."""

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
    """Returns (begin, end) of each chunk of a tensor of `size` elements. Lengths differ by one element at most, and the
    longer chunks are spread evenly. Some chunks are empty if there are fewer elements than chunks."""
    cuts = [chunk * size // schedule.chunks for chunk in range(schedule.chunks + 1)]
    return list(pairwise(cuts))


def side_by_side(*parts: Iterable[Round]) -> list[Round]:
    """Returns one list of rounds that runs several lists at the same time: its round i joins the rounds i of all lists.
    The lists must use different chunks or different ranks."""
    lists = [list(part) for part in parts]
    length = max((len(rounds) for rounds in lists), default=0)
    return [tuple(send for rounds in lists for send in (rounds[r] if r < len(rounds) else ())) for r in range(length)]


def placed(schedule: Schedule, ranks: Iterable[int], first_chunk: int) -> list[Round]:
    """Returns the rounds of `schedule`, moved to some ranks and chunks of a larger schedule: its rank i becomes
    `ranks[i]`, and its chunk c becomes chunk `first_chunk` + c."""
    group_ranks = list(ranks)
    return [
        tuple(Send(group_ranks[s.source], group_ranks[s.target], first_chunk + s.chunk, s.operation) for s in sends)
        for sends in schedule.rounds
    ]

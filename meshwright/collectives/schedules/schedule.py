"""`Schedule`: how ranks combine a tensor, as plain data. The executor runs it, the simulator prices it, `check` proves
it; it knows nothing of torch.

A tensor is cut into chunks, and rounds of sends move them. A send reads one chunk of its source and writes the same
chunk of its target: `add` adds to what is there, `copy` replaces it. Within a round a rank's chunk is written at most
once, and none is both read and written: so a round has one result, whatever the order of its sends. A rank that adds
two others to the same chunk takes two rounds, which also fixes the order of the sum, and so its bits.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Operation = Literal["copy", "add"]


@dataclass(frozen=True, slots=True)
class Send:
    source: int
    target: int
    chunk: int
    operation: Operation


Round = tuple[Send, ...]


@dataclass(frozen=True)
class Schedule:
    """Ranks are those of the group that runs it: 0 to `ranks` - 1."""

    name: str
    ranks: int
    chunks: int
    rounds: tuple[Round, ...]

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.chunks < 1:
            raise ValueError(f"{self.name}: {self.ranks} ranks and {self.chunks} chunks: there must be one of each")
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
            raise ValueError(f"{send} leaves the ranks 0 to {ranks - 1}")
        if not 0 <= send.chunk < chunks:
            raise ValueError(f"{send} leaves the chunks 0 to {chunks - 1}")
        if send.source == send.target:
            raise ValueError(f"{send} goes from a rank to itself")
        if send.operation not in ("copy", "add"):
            raise ValueError(f"{send} neither copies nor adds")
        place = (send.target, send.chunk)
        if place in written:
            raise ValueError(f"chunk {send.chunk} of rank {send.target} is written twice: in which order?")
        written.add(place)
        read.add((send.source, send.chunk))
    for rank, chunk in sorted(read & written):
        raise ValueError(f"chunk {chunk} of rank {rank} is read and written: which comes first?")


def bounds(schedule: Schedule, size: int) -> list[tuple[int, int]]:
    """Where each chunk of a tensor of `size` elements begins and ends: as even as can be, the longer ones spread out.
    Some are empty where there are fewer elements than chunks."""
    cuts = [chunk * size // schedule.chunks for chunk in range(schedule.chunks + 1)]
    return list(pairwise(cuts))


def side_by_side(*parts: Iterable[Round]) -> list[Round]:
    """Rounds of several schedules that touch different chunks or ranks, run at the same time; all begin together."""
    lists = [list(part) for part in parts]
    length = max((len(rounds) for rounds in lists), default=0)
    return [tuple(send for rounds in lists for send in (rounds[r] if r < len(rounds) else ())) for r in range(length)]


def placed(schedule: Schedule, ranks: Iterable[int], first_chunk: int) -> list[Round]:
    """The rounds of a schedule among some ranks of a larger world, on chunks from `first_chunk` on."""
    names = list(ranks)
    return [
        tuple(Send(names[s.source], names[s.target], first_chunk + s.chunk, s.operation) for s in sends)
        for sends in schedule.rounds
    ]

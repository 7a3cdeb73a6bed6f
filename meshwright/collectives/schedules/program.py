"""`RankProgram`: the sends and receives of one rank when a schedule runs on a tensor of some size, and what each of
them waits for. `execute.py` runs it, and the simulator prices it.

Chunks are cut into segments, and each segment passes through the rounds independently: it is sent on as soon as it has
arrived, while later segments are still under way. A rank waits for its receives in the order of (round + segment,
round), the diagonals of the pipeline. This cannot deadlock: of all awaited segments, the first one in that order
depends on none that is still awaited, so its sender has sent it.

Segments to add are received into a buffer and then added. Copies are received in place where that is safe, which means
that the arriving data depends on everything this rank sent of the same chunk, so those sends must have left before.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, bounds


class SendId(NamedTuple):
    """Identifies one of this rank's sends of a chunk."""

    round: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Consecutive chunks that this rank sends to another rank, or receives from it, in one round. `unsafe` are this
    rank's sends of the same chunks that may not have left when a received transfer arrives."""

    round: int
    peer: int
    operation: Operation
    chunks: range
    in_place: bool = False
    unsafe: frozenset[SendId] = frozenset()


@dataclass(frozen=True, slots=True)
class SegmentMessage:
    """One segment of a transfer: the elements from `begin` to `end`. Messages that share elements have the same `cell`,
    the number of a group of chunks and of a segment in it."""

    transfer: Transfer
    cell: tuple[int, int]
    begin: int
    end: int
    number: int  # counts the messages between the same two ranks

    @property
    def receive_order(self) -> tuple[int, int, int]:
        return (self.transfer.round + self.cell[1], self.transfer.round, self.begin)

    def follows(self, other: "SegmentMessage") -> bool:
        """Whether `other` has elements of this message in an earlier round."""
        return other.transfer.round < self.transfer.round and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """One receive. Once it has arrived and the sends `after` have left, its data is added or copied into the tensor,
    and the sends `then` start. Sends are indices into `RankProgram.sends`."""

    receive: SegmentMessage
    after: tuple[int, ...]
    then: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """All sends and receives of one rank. The sends `first` wait for no receive."""

    sends: tuple[SegmentMessage, ...]
    first: tuple[int, ...]
    steps: tuple[ReceiveStep, ...]


def build_program(
    schedule: Schedule, transfers: tuple[list[Transfer], list[Transfer]], size: int, segment: int
) -> RankProgram:
    """Returns the program for a tensor of `size` elements, in segments of at most `segment` elements. `transfers` are
    the sends and receives of the rank (`rank_transfers`)."""
    chunk_bounds = bounds(schedule, size)
    sends = list(_messages(transfers[0], chunk_bounds, segment))
    receives = sorted(_messages(transfers[1], chunk_bounds, segment), key=lambda message: message.receive_order)
    sends_of, receives_of = _by_cell(sends), _by_cell(receives)
    then: dict[int, list[int]] = defaultdict(list)  # by receive: sends follow the last receive whose data they contain
    for number, send in enumerate(sends):
        sources = (index for index in receives_of[send.cell] if send.follows(receives[index]))
        then[max(sources, default=-1)].append(number)
    steps = []
    for index, receive in enumerate(receives):
        earlier = (number for number in sends_of[receive.cell] if receive.follows(sends[number]))
        after = (n for n in earlier if _send_id(sends[n].transfer) in receive.transfer.unsafe)
        steps.append(ReceiveStep(receive, tuple(after), tuple(then[index])))
    return RankProgram(tuple(sends), tuple(then[-1]), tuple(steps))


def rank_transfers(schedule: Schedule, rank: int) -> tuple[list[Transfer], list[Transfer]]:
    """Returns what a rank sends, and what it receives, in the order of rounds."""
    outgoing: list[Transfer] = []
    incoming: list[Transfer] = []
    departures = _Departures(schedule.chunks, rank)
    for number, sends in enumerate(schedule.rounds):
        for (source, target, operation), chunks in _merged_chunks(sends, rank):
            if source == rank:
                outgoing.append(Transfer(number, target, operation, chunks))
                continue
            unsafe = frozenset(send for chunk in chunks for send in departures.possibly_pending(source, chunk))
            in_place = operation == "copy" and not unsafe and not any(departures.unsent[chunk] for chunk in chunks)
            incoming.append(Transfer(number, source, operation, chunks, in_place, unsafe))
        departures.add_round(number, sends)
    return outgoing, incoming


def _send_id(transfer: Transfer) -> SendId:
    return SendId(transfer.round, transfer.peer)


class _Departures:
    """Tracks which of one rank's sends must have left by the time that other ranks hold a chunk. A send has left when
    its target received it, and when any rank received the chunk from a rank for which that is true. `unsent` marks
    chunks that this rank has received and not sent since: no other rank can depend on that receive."""

    def __init__(self, chunks: int, rank: int) -> None:
        self._rank = rank
        self._sends: list[set[SendId]] = [set() for _ in range(chunks)]
        self._departed: dict[tuple[int, int], frozenset[SendId]] = defaultdict(frozenset)  # by rank and chunk
        self.unsent = [False] * chunks

    def possibly_pending(self, source: int, chunk: int) -> set[SendId]:
        """Returns this rank's sends of the chunk that may not have left when `source` sends the chunk."""
        return self._sends[chunk] - self._departed[source, chunk]

    def add_round(self, number: int, sends: Round) -> None:
        for send in sends:
            departed = self._departed[send.source, send.chunk]
            if send.source == self._rank:
                send_id = SendId(number, send.target)
                self._sends[send.chunk].add(send_id)
                self.unsent[send.chunk] = False
                departed |= {send_id}
            elif send.target == self._rank:
                self.unsent[send.chunk] = True
            if departed:
                self._departed[send.target, send.chunk] |= departed


def _merged_chunks(sends: Round, rank: int) -> Iterator[tuple[tuple[int, int, Operation], range]]:
    """Yields the sends and receives of a rank in one round as ((source, target, operation), chunks), with neighboring
    chunks merged."""
    rank_sends = [send for send in sends if rank in (send.source, send.target)]
    rank_sends.sort(key=lambda send: (send.source, send.target, send.operation, send.chunk))
    numbered = enumerate(rank_sends)
    # The difference of chunk and index is constant as long as chunks are consecutive.
    for key, group in groupby(
        numbered, key=lambda pair: (pair[1].source, pair[1].target, pair[1].operation, pair[1].chunk - pair[0])
    ):
        chunks = [send.chunk for _, send in group]
        yield key[:3], range(chunks[0], chunks[-1] + 1)


def _messages(
    transfers: Iterable[Transfer], chunk_bounds: Sequence[tuple[int, int]], segment: int
) -> Iterator[SegmentMessage]:
    """Yields the segments of transfers, which are the same for sender and receiver. A long chunk is cut into several
    segments; several short chunks share one. Empty segments are not sent."""
    longest = max(end - begin for begin, end in chunk_bounds)
    segments = max(1, -(-longest // segment))
    chunks_per_segment = 1 << max(0, (segment // max(1, longest)).bit_length() - 1)
    counts: Counter[int] = Counter()
    for transfer in transfers:
        for chunk_group, members in groupby(transfer.chunks, key=lambda chunk: chunk // chunks_per_segment):
            chunks = list(members)
            begin, end = chunk_bounds[chunks[0]][0], chunk_bounds[chunks[-1]][1]
            for number in range(segments):
                first = begin + number * (end - begin) // segments
                last = begin + (number + 1) * (end - begin) // segments
                if first < last:
                    yield SegmentMessage(transfer, (chunk_group, number), first, last, counts[transfer.peer])
                    counts[transfer.peer] += 1


def _by_cell(messages: Sequence[SegmentMessage]) -> dict[tuple[int, int], list[int]]:
    """Returns the indices of the messages by cell."""
    indices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        indices[message.cell].append(index)
    return indices

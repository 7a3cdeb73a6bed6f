"""`RankProgram`: the sends and receives of one rank when a schedule runs on a tensor of a given size, and what each of
them waits for. `execute.py` runs it, and the simulator prices it.

Chunks are cut into segments, and each segment passes through the rounds independently: a rank sends a segment on as
soon as it has arrived, while later segments are still under way. A rank waits for its receives in the order of (round +
segment number, round). This cannot deadlock, because the first of all awaited segments in that order depends on no
segment that is still awaited, therefore its sender has sent it.

Segments to add are received into a buffer and then added. Segments to copy are received directly into the tensor where
that is safe. It is safe if the arriving data depends on everything that this rank sent of the same chunk, because those
sends must then have left before the data arrives.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, bounds


class SendId(NamedTuple):
    """Identifies one of this rank's sends of a given chunk, by its round and target rank."""

    round: int
    target: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """Consecutive chunks that this rank sends to `peer`, or receives from `peer`, in one round.

    `in_place` and `unsafe` are set for receives only. `in_place`: the data can be received directly into the tensor.
    `unsafe`: this rank's sends of the same chunks that may not have left when the data arrives.
    """

    round: int
    peer: int
    operation: Operation
    chunks: range
    in_place: bool = False
    unsafe: frozenset[SendId] = frozenset()


@dataclass(frozen=True, slots=True)
class SegmentMessage:
    """One segment of a transfer: the tensor's elements from `begin` to `end`. `cell` is (number of a group of chunks,
    number of the segment in it). Messages that share elements have the same cell."""

    transfer: Transfer
    cell: tuple[int, int]
    begin: int
    end: int
    number: int  # counts the messages between the same two ranks

    @property
    def receive_order(self) -> tuple[int, int, int]:
        return (self.transfer.round + self.cell[1], self.transfer.round, self.begin)

    def follows(self, other: "SegmentMessage") -> bool:
        """Whether `other` is of an earlier round and has elements of this message."""
        return other.transfer.round < self.transfer.round and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class ReceiveStep:
    """One receive and what follows it. Once the data has arrived and the sends in `after` have left, the data is added
    or copied into the tensor, and then the sends in `then` start. `after` and `then` are indices into
    `RankProgram.sends`."""

    receive: SegmentMessage
    after: tuple[int, ...]
    then: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankProgram:
    """All sends and receives of one rank. `first` are the indices of the sends that wait for no receive; `steps` are in
    the order in which the receives are awaited."""

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
    then: dict[int, list[int]] = defaultdict(list)  # by receive, the sends that contain its data; -1: no receive
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
    """Returns (sends, receives) of a rank, each in the order of rounds."""
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
    """Tracks which of one rank's sends of a chunk must have left by the time that another rank has a copy of the chunk.

    A rank knows that a send has left if it received that send, or if it received the chunk from a rank that knows this.
    `unsent` has, for each chunk, whether this rank has received it and not sent it since. If so, no other rank can
    depend on that receive.
    """

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
    """Yields the segments of the transfers. Sender and receiver cut them in the same way. A long chunk is cut into
    several segments; several short chunks share one. Empty segments are left out."""
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
    """Returns, for each cell, the indices of its messages."""
    indices: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, message in enumerate(messages):
        indices[message.cell].append(index)
    return indices

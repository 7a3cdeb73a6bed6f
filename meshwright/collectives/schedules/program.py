"""What one rank does when a schedule runs on a tensor of some size: its sends and receives, and what each waits for.

Chunks are cut into segments, and each segment goes through the rounds for itself: it is sent on as soon as it has
arrived, while the ones behind it still travel. A rank waits for what it receives in the order of (round + segment,
round), the diagonals of the pipeline. Nobody can wait forever: of all awaited segments, the first one in that order
depends on none that is still awaited, so its sender has sent it.

Sums are received beside the tensor and then added. Copies are received in place, where that is safe: where what arrives
was made from all that this rank sent of it, it cannot arrive before those sends have left.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from meshwright.collectives.schedules.schedule import Operation, Round, Schedule, bounds

OwnSend = tuple[int, int]  # in which round, to whom


@dataclass(frozen=True, slots=True)
class Transfer:
    """What this rank sends another one in one round, or receives: chunks that follow one another travel together."""

    round: int
    peer: int
    operation: Operation
    chunks: range
    in_place: bool = False
    unsafe: frozenset[OwnSend] = frozenset()  # own sends of these chunks that may not have left when it arrives


@dataclass(frozen=True, slots=True)
class Message:
    """One segment of a transfer. Messages that touch the same elements lie in the same cell."""

    transfer: Transfer
    cell: tuple[int, int]
    begin: int
    end: int
    number: int  # among those between the same two ranks

    @property
    def turn(self) -> tuple[int, int, int]:
        return (self.transfer.round + self.cell[1], self.transfer.round, self.begin)

    def follows(self, other: "Message") -> bool:
        """Whether `other` has elements of this one in an earlier round."""
        return other.transfer.round < self.transfer.round and self.begin < other.end and other.begin < self.end


@dataclass(frozen=True, slots=True)
class Step:
    """One receive: once it has come and the sends `after` have left, it is put in place and the sends `then` go."""

    receive: Message
    after: tuple[int, ...]
    then: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Program:
    sends: tuple[Message, ...]
    first: tuple[int, ...]  # those that wait for nothing
    steps: tuple[Step, ...]


def program(schedule: Schedule, transfers: tuple[list[Transfer], list[Transfer]], size: int, segment: int) -> Program:
    """For a tensor of `size` elements, in segments of at most `segment` elements; `transfers` of the rank."""
    places = bounds(schedule, size)
    sends = list(_messages(transfers[0], places, segment))
    receives = sorted(_messages(transfers[1], places, segment), key=lambda message: message.turn)
    sends_of, receives_of = _by_cell(sends), _by_cell(receives)
    then: dict[int, list[int]] = defaultdict(list)  # a send goes behind the last receive that it hands on
    for number, send in enumerate(sends):
        handed_on = (place for place in receives_of[send.cell] if send.follows(receives[place]))
        then[max(handed_on, default=-1)].append(number)
    steps = []
    for place, receive in enumerate(receives):
        earlier = (number for number in sends_of[receive.cell] if receive.follows(sends[number]))
        after = (n for n in earlier if (sends[n].transfer.round, sends[n].transfer.peer) in receive.transfer.unsafe)
        steps.append(Step(receive, tuple(after), tuple(then[place])))
    return Program(tuple(sends), tuple(then[-1]), tuple(steps))


def transfers(schedule: Schedule, rank: int) -> tuple[list[Transfer], list[Transfer]]:
    """What a rank sends, and what it receives, in the order of rounds."""
    outgoing: list[Transfer] = []
    incoming: list[Transfer] = []
    departures = _Departures(schedule.chunks, rank)
    for number, sends in enumerate(schedule.rounds):
        for (source, target, operation), chunks in _joined(sends, rank):
            if source == rank:
                outgoing.append(Transfer(number, target, operation, chunks))
                continue
            unsafe = frozenset(send for chunk in chunks for send in departures.unknown(source, chunk))
            in_place = operation == "copy" and not unsafe and not any(departures.open[chunk] for chunk in chunks)
            incoming.append(Transfer(number, source, operation, chunks, in_place, unsafe))
        departures.follow(number, sends)
    return outgoing, incoming


class _Departures:
    """Who knows, when a schedule runs, which of one rank's sends have left: whoever received them, and whoever received
    the chunk from somebody who knew."""

    def __init__(self, chunks: int, rank: int) -> None:
        self._rank = rank
        self._sent: list[set[OwnSend]] = [set() for _ in range(chunks)]
        self._known: dict[tuple[int, int], frozenset[OwnSend]] = defaultdict(frozenset)
        self.open = [False] * chunks  # received, and not sent since: nobody can know that it was received

    def unknown(self, source: int, chunk: int) -> set[OwnSend]:
        """Own sends of a chunk which `source` does not know to have left."""
        return self._sent[chunk] - self._known[source, chunk]

    def follow(self, number: int, sends: Round) -> None:
        for send in sends:
            known = self._known[send.source, send.chunk]
            if send.source == self._rank:
                self._sent[send.chunk].add((number, send.target))
                self.open[send.chunk] = False
                known |= {(number, send.target)}
            elif send.target == self._rank:
                self.open[send.chunk] = True
            if known:
                self._known[send.target, send.chunk] |= known


def _joined(sends: Round, rank: int) -> Iterator[tuple[tuple[int, int, Operation], range]]:
    """A rank's sends and receives of a round, those of neighboring chunks as one."""
    own = [send for send in sends if rank in (send.source, send.target)]
    own.sort(key=lambda send: (send.source, send.target, send.operation, send.chunk))
    numbered = enumerate(own)
    # The difference of chunk and place stays the same as long as chunks follow one another.
    for key, found in groupby(
        numbered, key=lambda pair: (pair[1].source, pair[1].target, pair[1].operation, pair[1].chunk - pair[0])
    ):
        chunks = [send.chunk for _, send in found]
        yield key[:3], range(chunks[0], chunks[-1] + 1)


def _messages(found: Iterable[Transfer], places: Sequence[tuple[int, int]], segment: int) -> Iterator[Message]:
    """The segments of transfers, the same ones for sender and receiver. A long chunk is cut into cells; short chunks
    share one. Empty ones stay at home."""
    longest = max(end - begin for begin, end in places)
    cuts = max(1, -(-longest // segment))
    together = 1 << max(0, (segment // max(1, longest)).bit_length() - 1)
    counts: Counter[int] = Counter()
    for transfer in found:
        for shared, members in groupby(transfer.chunks, key=lambda chunk: chunk // together):
            chunks = list(members)
            begin, end = places[chunks[0]][0], places[chunks[-1]][1]
            for cut in range(cuts):
                edges = begin + cut * (end - begin) // cuts, begin + (cut + 1) * (end - begin) // cuts
                if edges[0] < edges[1]:
                    yield Message(transfer, (shared, cut), *edges, counts[transfer.peer])
                    counts[transfer.peer] += 1


def _by_cell(messages: Sequence[Message]) -> dict[tuple[int, int], list[int]]:
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, message in enumerate(messages):
        found[message.cell].append(place)
    return found

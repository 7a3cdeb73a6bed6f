"""How long CPU ranks take to combine a tensor: the very schedule that `execute` runs, message by message, and what the
backend's own all-reduce and shared memory take on the same wires.

A tensor of S bytes on n ranks, k of them on a node; messages of b bytes, where chunks that go to one rank in one round
travel together and are cut into segments as collectives/schedules/program.py does it.

    host        = message_s / 2 for a send, as much for a receive, + b / add where it is added, + b / copy where it was
                  not received in place, + b byte_s / 2 on each side for the transport: all on the node's cores
                                                                                            _Ranks._work, _Ranks._carry
    wire        : a message leaves once its sender has heard (after latency) that there is room for it; the link is
                  taken for b / together once it is free, or credit before that if it was idle; nothing arrives
                  sooner than b / bandwidth - credit + latency after it left                _Ranks._leave
    program     = every rank takes its steps in their order, as soon as what each waits for is there   _Ranks.run
    schedule_s  = thread_s + S / add (the division by n) + the end of the last rank         schedule_s
    native      = call_s + S / add + a ring of Gloo's segments: of a chunk two at least, of 1 MiB at most; each
                  waits `native_latency` times the latency that Python's messages have      native_s
    shared      = 2 sync_s + S / reduce(S); up to 8 KiB staged_s + (n + 2) S / copy         shared_memory_s
    two levels  = thread_s + 2 sync_s + S / scatter(S) + the schedules between nodes, of S / k each, k at once
                  + 2 sync_s + S / gather(S)                                                two_level_memory_s
    crowded     : syncs and rates of memory by the ranks that share a core                  of_cluster
    choose      = the cheapest of them                                                      choose
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count as count_from
from math import exp, inf, log

from meshwright.collectives.execute import AHEAD, SEGMENT_BYTES
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.program import Message, Program, Step, Transfer, program, transfers
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.schedules.schedule import Schedule, placed, side_by_side
from meshwright.collectives.schedules.two_level import across_nodes
from meshwright.collectives.shared_memory.steps import STAGE_UP_TO_BYTES
from meshwright.errors import InputError

# Gloo's `AllreduceOptions`: torch leaves its algorithm unspecified, which is the ring of gloo/allreduce.cc.
GLOO_SEGMENT_BYTES = 2**20
GLOO_SEGMENTS = 2  # of a rank's chunk, at least: one travels while the other is added
# Programs of every rank are followed message by message: 64 ranks in a ring send 16,000 of them.
MOST_RANKS = 64


@dataclass(frozen=True)
class Tier:
    """Within a node, or between two: one message's latency and bandwidth when it travels alone, and the bytes a second
    of all that go from one node to another (or within one) at the same time. A link that was idle may let the first
    bytes through at once, as shapers of clouds do: they save `credit_s`, and idle time brings it back."""

    latency_s: float
    bandwidth_bytes_per_s: float
    together_bytes_per_s: float
    credit_s: float = 0.0


@dataclass(frozen=True)
class Host:
    """What a node's `cores` do for it. Seconds of a core for a message's send and receive, from Python and by the
    backend itself, and for a byte's; to hand a tensor to a reducer's thread, or to the backend's, and to hear of its
    end; and bytes a second that a core adds and copies. `native_latency` is how many times a tier's latency the
    backend's own messages have."""

    cores: float
    message_s: float
    native_message_s: float
    native_latency: float
    byte_s: float
    thread_s: float
    call_s: float
    add_bytes_per_s: float
    copy_bytes_per_s: float


Rates = tuple[tuple[int, float], ...]  # (bytes of a tensor, how many of them a second)


@dataclass(frozen=True)
class Memory:
    """Between the ranks of a node: until all know that all have come; a tensor of no size, copied; and how fast whole
    tensors are combined, or only summed up in slices, or only gathered, behind the waiting."""

    sync_s: float
    staged_s: float
    reduce: Rates
    scatter: Rates
    gather: Rates


@dataclass(frozen=True)
class Wires:
    """What collectives of CPU ranks take their time with, measured or known of a cluster. Without `memory` ranks of a
    node cannot share it; without `across` there is one node."""

    within: Tier
    across: Tier | None
    host: Host
    memory: Memory | None


def schedule_s(schedule: Schedule, size_bytes: int, wires: Wires, nodes: Sequence[int] | None = None) -> float:
    """Seconds of the reducer that runs this schedule. `nodes`: how many of the ranks each node has, in their order;
    None: all are on one."""
    if schedule.ranks == 1 or not size_bytes:
        return 0.0
    host = wires.host
    way = _Way(SEGMENT_BYTES, host.message_s)
    run_s = _run_s(schedule, size_bytes, way, wires, _node_of(schedule.ranks, nodes))
    return host.thread_s + size_bytes / host.add_bytes_per_s + run_s


def native_s(size_bytes: int, ranks: int, wires: Wires, nodes: Sequence[int] | None = None) -> float:
    """Of Gloo's own all-reduce, and the division by the number of ranks before it."""
    if ranks == 1 or not size_bytes:
        return 0.0
    host = wires.host
    run_s = _run_s(_ring(ranks), size_bytes, _gloo(size_bytes, ranks, host), wires, _node_of(ranks, nodes))
    return host.call_s + size_bytes / host.add_bytes_per_s + run_s


def shared_memory_s(size_bytes: int, ranks: int, wires: Wires) -> float:
    if ranks == 1 or not size_bytes:
        return 0.0
    memory = _memory(wires)
    if size_bytes <= STAGE_UP_TO_BYTES:
        return memory.staged_s + (ranks + 2) * size_bytes / wires.host.copy_bytes_per_s
    return 2 * memory.sync_s + size_bytes / rate(memory.reduce, size_bytes)


def two_level_memory_s(size_bytes: int, nodes: Sequence[int], wires: Wires) -> float:
    """Of equally many ranks on each node, at least two."""
    many, (ranks,) = len(nodes), set(nodes)
    memory, host, own = _memory(wires), wires.host, -(-size_bytes // ranks)
    inside_s = 4 * memory.sync_s + sum(
        size_bytes / rate(rates, size_bytes) for rates in (memory.scatter, memory.gather)
    )
    way = _Way(SEGMENT_BYTES, host.message_s)
    run_s = _run_s(_slots(many, ranks), size_bytes, way, wires, _node_of(ranks * many, nodes))
    return host.thread_s + inside_s + own / host.add_bytes_per_s + run_s


def _memory(wires: Wires) -> Memory:
    if wires.memory is None:
        raise InputError("these ranks cannot share memory: price another algorithm")
    return wires.memory


def prices(size_bytes: int, ranks: int, nodes: Sequence[int], wires: Wires) -> dict[str, float]:
    """Seconds of every way to combine a tensor over these ranks; `nodes`: how many of them each node has."""
    if sum(nodes) != ranks:
        raise InputError(f"nodes of {list(nodes)} ranks are {sum(nodes)} ranks, but {ranks} combine their gradients")
    found = {"native": native_s(size_bytes, ranks, wires, nodes)}
    for name in SCHEDULES:
        if name != "two_level" or len(nodes) > 1:
            found[name] = schedule_s(_built(name, ranks, tuple(nodes)), size_bytes, wires, nodes)
    if wires.memory is None:
        return found
    if len(nodes) == 1:
        found["shared_memory"] = shared_memory_s(size_bytes, ranks, wires)
    elif len(set(nodes)) == 1 and nodes[0] > 1:
        found["two_level_memory"] = two_level_memory_s(size_bytes, nodes, wires)
    return found


def choose(size_bytes: int, ranks: int, nodes: Sequence[int], wires: Wires) -> tuple[str, float]:
    """The cheapest way and its seconds: `native`, a schedule's name, `shared_memory` or `two_level_memory`."""
    found = prices(size_bytes, ranks, nodes, wires)
    fastest = min(found, key=found.__getitem__)
    return fastest, found[fastest]


# ---- a schedule on wires


@dataclass(frozen=True)
class _Way:
    """How a program is run: in which segments, what a message costs a core, and how often a tier's latency."""

    segment_bytes: int
    message_s: float
    latency: float = 1.0


def _gloo(size_bytes: int, ranks: int, host: Host) -> _Way:
    pieces = max(-(-size_bytes // GLOO_SEGMENT_BYTES), GLOO_SEGMENTS * ranks)
    of_chunk = -(-pieces // ranks)
    return _Way(max(1, -(-size_bytes // (ranks * of_chunk))), host.native_message_s, host.native_latency)


def _run_s(schedule: Schedule, size_bytes: int, way: _Way, wires: Wires, node_of: Sequence[int]) -> float:
    programs = [program(schedule, own, size_bytes, way.segment_bytes) for own in _transfers(schedule)]
    return _Ranks(programs, way, wires, node_of).run()


_Key = tuple[int, int, int]  # source, target, and the number of a message among theirs


class _Ranks:
    """Ranks that run their programs. What happens is taken in the order of its time, so that cores and links serve who
    comes first."""

    def __init__(self, programs: Sequence[Program], way: _Way, wires: Wires, node_of: Sequence[int]) -> None:
        self._programs, self._way, self._wires, self._node_of = programs, way, wires, node_of
        self._free = [0.0] * len(programs)  # when a rank has done its last step
        self._step = [0] * len(programs)
        self._room: dict[_Key, float] = {}  # since when a sender knows of it
        self._held: dict[_Key, tuple[float, int]] = {}  # sent when, and how many bytes, for which there is no room yet
        self._arrived: dict[_Key, float] = {}
        self._waiting: dict[_Key, int] = {}
        self._link_free: defaultdict[tuple[int, int], float] = defaultdict(lambda: -inf)  # idle until now
        count = max(1, round(wires.host.cores))
        self._core_free = {node: [0.0] * count for node in set(node_of)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = count_from(0)

    def run(self) -> float:
        for rank, own in enumerate(self._programs):
            for place in range(min(AHEAD, len(own.steps))):
                self._post(rank, place)
        for rank, own in enumerate(self._programs):
            self._work(rank, 0.0, 0.0, own.first)
            self._later(0.0, partial(self._turn, rank))
        while self._events:
            heappop(self._events)[2]()
        assert not self._waiting, "a schedule that waits for itself"
        return max(self._free)

    def _later(self, when: float, what: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._count), what))

    def _turn(self, rank: int) -> None:
        """The rank's next step, now if what it receives has arrived."""
        own, place = self._programs[rank], self._step[rank]
        if place == len(own.steps):
            return
        step = own.steps[place]
        key = (step.receive.transfer.peer, rank, step.receive.number)
        if key not in self._arrived:
            self._waiting[key] = rank
            return
        begin = max(self._free[rank], self._arrived[key])
        self._later(begin, partial(self._take, rank, key, step))

    def _take(self, rank: int, key: _Key, step: Step) -> None:
        begin = max(self._free[rank], self._arrived.pop(key))
        self._work(rank, begin, self._way.message_s / 2 + self._put_s(step.receive), step.then)
        place = self._step[rank]
        self._step[rank] += 1
        if place + AHEAD < len(self._programs[rank].steps):
            self._post(rank, place + AHEAD)
        self._turn(rank)

    def _put_s(self, message: Message) -> float:
        size = message.end - message.begin
        if message.transfer.operation == "add":
            return size / self._wires.host.add_bytes_per_s
        return 0.0 if message.transfer.in_place else size / self._wires.host.copy_bytes_per_s

    def _work(self, rank: int, begin: float, seconds: float, sends: Sequence[int]) -> None:
        """On one core, and then it sends."""
        each_s = self._way.message_s / 2
        end = self._carry(self._node_of[rank], begin, seconds + len(sends) * each_s)
        self._free[rank] = end
        for place, number in enumerate(sends):
            message = self._programs[rank].sends[number]
            sent, size = end - (len(sends) - 1 - place) * each_s, message.end - message.begin
            key = (rank, message.transfer.peer, message.number)
            if key in self._room:
                self._hand_over(key, sent, size)
            else:
                self._held[key] = (sent, size)

    def _carry(self, node: int, begin: float, seconds: float) -> float:
        """When it ends, on the core of the node that is free first."""
        if not seconds:
            return begin
        cores = self._core_free[node]
        end = max(begin, heappop(cores)) + seconds
        heappush(cores, end)
        return end

    def _post(self, rank: int, place: int) -> None:
        message = self._programs[rank].steps[place].receive
        key = (message.transfer.peer, rank, message.number)
        self._room[key] = self._free[rank] + self._latency_s(*key[:2])
        if key in self._held:
            self._hand_over(key, *self._held.pop(key))

    def _hand_over(self, key: _Key, sent: float, size: int) -> None:
        left = max(sent, self._room.pop(key))
        self._later(left, partial(self._leave, key, left, size))

    def _leave(self, key: _Key, left: float, size: int) -> None:
        """A message that was sent, and for which there is room."""
        source, target, _ = key
        link, tier = (self._node_of[source], self._node_of[target]), self._tier(source, target)
        begin = max(left - tier.credit_s, self._link_free[link])
        self._link_free[link] = begin + size / tier.together_bytes_per_s
        copied = [self._carry(node, left, size * self._wires.host.byte_s / 2) for node in link]
        alone = left + max(0.0, size / tier.bandwidth_bytes_per_s - tier.credit_s)
        wired = max(self._link_free[link], alone, *copied)
        self._arrived[key] = wired + self._latency_s(source, target)
        if (waiting := self._waiting.pop(key, None)) is not None:
            self._turn(waiting)

    def _latency_s(self, source: int, target: int) -> float:
        return self._tier(source, target).latency_s * self._way.latency

    def _tier(self, source: int, target: int) -> Tier:
        if self._node_of[source] == self._node_of[target]:
            return self._wires.within
        assert self._wires.across is not None, "nodes without a link between them"
        return self._wires.across


def _node_of(ranks: int, nodes: Sequence[int] | None) -> list[int]:
    return [node for node, count in enumerate(nodes or [ranks]) for _ in range(count)]


@lru_cache(maxsize=64)
def _built(name: str, ranks: int, nodes: tuple[int, ...]) -> Schedule:
    return build(name, ranks, nodes)


@lru_cache(maxsize=64)
def _ring(ranks: int) -> Schedule:
    return ring(ranks)


@lru_cache(maxsize=64)
def _slots(nodes: int, per_node: int) -> Schedule:
    """One for each place on a node, among the ranks that have it, each with its slice of the tensor."""
    one = across_nodes(nodes)
    rounds = side_by_side(
        *(placed(one, range(slot, nodes * per_node, per_node), slot * one.chunks) for slot in range(per_node))
    )
    return Schedule("slots", nodes * per_node, one.chunks * per_node, tuple(rounds))


@lru_cache(maxsize=64)
def _transfers(schedule: Schedule) -> list[tuple[list[Transfer], list[Transfer]]]:
    return [transfers(schedule, rank) for rank in range(schedule.ranks)]


def rate(points: Rates, size_bytes: float) -> float:
    """Between measured sizes a straight line in log(bytes) and log(rate); outside of them as at the nearest."""
    place = bisect_left([size for size, _ in points], size_bytes)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (small, slow), (large, fast) = points[place - 1], points[place]
    share = log(size_bytes / small) / log(large / small)
    return slow * exp(share * log(fast / slow))

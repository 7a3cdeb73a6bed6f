"""What the wires between ranks take, measured on the spot: single messages, many at once, and memory that ranks share.

Every rank calls these together. Nothing is read off the table that is to be predicted: wires are messages from one rank
to another, and what hosts do is the time of their cores. The backend's call, a core's work for a schedule's message and
shared memory's rates are those of collectives, at sizes that the table does not have.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from meshwright.bench.collectives.timing import Taken, timed
from meshwright.cluster.cores import usable_cores
from meshwright.collectives.native import Native
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import Scheduled
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.shared_memory.reducer import SharedMemory
from meshwright.collectives.threaded import Threaded
from meshwright.errors import InputError
from meshwright.simulator.communication.schedules import GLOO_SEGMENTS, Host, Memory, Tier, Wires, native_s, schedule_s

SMALL_BYTES = 48
MEDIUM_BYTES = 48 * 2**10
LARGE_BYTES = 3 * 2**20
MEMORY_BYTES = tuple(3 * 2**power for power in range(13, 26, 2))
BURST, LARGE_BURST, TURNS, OFTEN = 32, 8, 5, 60
HALVINGS = 12
NATIVE_LATENCIES = tuple(share / 20 for share in range(1, 401))
_SMALL_SHARE_BYTES = 16  # of each rank, in an all-reduce of next to nothing
_TAG = 7


class _Ring:
    """Ranks that hand messages to the next one, all at once; `mine` are those of this rank's ring."""

    def __init__(self, group: dist.ProcessGroup, mine: Sequence[int]) -> None:
        place = list(mine).index(group.rank())
        self._group, self._alone = group, len(mine) == 1
        self._next, self._before = mine[(place + 1) % len(mine)], mine[place - 1]

    def pass_on(self, size: int, count: int) -> Taken:
        """One message of so many that each rank sends, before it waits for any."""
        given, rooms = ([torch.ones(size // 4) for _ in range(count)] for _ in range(2))

        def run() -> None:
            if self._alone:
                return
            works = [dist.irecv(room, group=self._group, group_src=self._before, tag=_TAG) for room in rooms]
            works += [dist.isend(sent, group=self._group, group_dst=self._next, tag=_TAG) for sent in given]
            for work in works:
                assert work is not None
                work.wait()

        taken = timed(self._group, run, 2)
        return Taken(taken.wall_s / count, taken.core_s / count)

    def in_turn(self, count: int) -> float:
        """So many small messages, each sent when the one before it has come, in a reducer's thread: as a schedule's."""
        sent, room = torch.ones(SMALL_BYTES // 4), torch.empty(SMALL_BYTES // 4)

        def reduce(flat: torch.Tensor, bucket: int) -> None:
            for _ in range(0 if self._alone else count):
                coming = dist.irecv(room, group=self._group, group_src=self._before, tag=_TAG)
                going = dist.isend(sent, group=self._group, group_dst=self._next, tag=_TAG)
                for work in (coming, going):
                    assert work is not None
                    work.wait()

        reducer = Threaded("in turn", self._group, reduce)
        found = timed(self._group, partial(_reduce, reducer, sent), OFTEN).wall_s
        reducer.close()
        return found


def measure_wires(group: dist.ProcessGroup, nodes: Sequence[int], machines: int) -> Wires:
    """`nodes`: how many ranks each has, in their order; they may be on fewer `machines`, whose cores they share."""
    rank, many = group.rank(), len(nodes)
    firsts = [sum(nodes[:place]) for place in range(many)]
    node = max(place for place, first in enumerate(firsts) if first <= rank)
    mine = range(firsts[node], firsts[node] + nodes[node])
    opposite = [first + rank - mine.start for first, count in zip(firsts, nodes, strict=True)
                if rank - mine.start < count]  # fmt: skip
    cores = usable_cores() * machines / many
    inner, outer = _Ring(group, mine), _Ring(group, opposite)
    each = inner if nodes[0] > 1 else outer
    host, raw_s = _host(group, each, cores)
    crowded_s = raw_s * max(1.0, nodes[0] / cores)
    within = _tier(group, inner, (0, 1), nodes[0], crowded_s) if nodes[0] > 1 else None
    across = _tier(group, outer, (0, firsts[1]), min(nodes), crowded_s) if many > 1 else None
    tier = within or across
    assert tier is not None, "one rank has no wires"
    wires = _with_schedule(Wires(tier, across, host, _memory(group, mine)), group, nodes)
    return _with_native(wires, group, nodes)


def _host(group: dist.ProcessGroup, each: _Ring, cores: float) -> tuple[Host, float]:
    """And the seconds of a core for a bare message, which stand for every kind of them here."""
    raw_s = each.pass_on(SMALL_BYTES, BURST).core_s
    large_s = each.pass_on(LARGE_BYTES, LARGE_BURST).core_s
    own, other = torch.ones(LARGE_BYTES // 4), torch.zeros(LARGE_BYTES // 4)
    host = Host(
        cores=cores,
        message_s=raw_s,
        native_message_s=raw_s,
        native_latency=1.0,
        byte_s=max(0.0, large_s - raw_s) / LARGE_BYTES,
        thread_s=max(_in_turn(each)[1], _idle_s(group)),
        call_s=0.0,
        add_bytes_per_s=LARGE_BYTES / timed(group, lambda: own.add_(other), 10).core_s,
        copy_bytes_per_s=LARGE_BYTES / timed(group, lambda: own.copy_(other), 10).core_s,
    )
    return host, raw_s


def _idle_s(group: dist.ProcessGroup) -> float:
    idle, one = Threaded("idle", group, lambda flat, bucket: None), torch.ones(1)
    found = timed(group, partial(_reduce, idle, one), 50).wall_s
    idle.close()
    return found


def _with_schedule(wires: Wires, group: dist.ProcessGroup, nodes: Sequence[int]) -> Wires:
    """What a message takes with all that goes on around it while a schedule runs."""
    small = _SMALL_SHARE_BYTES * group.size()
    reducer = Scheduled(group, ring(group.size()))
    taken = timed(group, partial(_reduce, reducer, torch.ones(small // 4)), OFTEN)
    dist.barrier(group)
    reducer.close()
    return working(wires, taken, small, nodes)


def working(wires: Wires, taken: Taken, small: int, nodes: Sequence[int]) -> Wires:
    """With as many seconds of a core for a message as make a ring of so few bytes take as long as it did. Several cores
    work for a rank: what they do side by side keeps nobody waiting, so that is no more than what they were busy."""
    schedule = ring(sum(nodes))
    least, most = 0.0, taken.core_s / (2 * (sum(nodes) - 1))

    def with_message(seconds: float) -> Wires:
        return replace(wires, host=replace(wires.host, message_s=seconds))

    for _ in range(HALVINGS):
        middle = (least + most) / 2
        if schedule_s(schedule, small, with_message(middle), nodes) < taken.wall_s:
            least = middle
        else:
            most = middle
    return with_message(most)


def _tier(group: dist.ProcessGroup, each: _Ring, pair: tuple[int, int], count: int, host_s: float) -> Tier:
    """Latency as a message has it that waits for the one before it: Gloo sends it when it has heard that there is room.
    Bandwidth as one has it that is alone, and as those of `count` ranks of a node together. Credit is what a message
    of some size takes less than that."""
    small, medium, large = (_ping_pong(group, pair, size) for size in (SMALL_BYTES, MEDIUM_BYTES, LARGE_BYTES))
    together = count * LARGE_BYTES / each.pass_on(LARGE_BYTES, LARGE_BURST).wall_s
    alone = (LARGE_BYTES - MEDIUM_BYTES) / max(large - medium, large / 10)
    round_s, _ = _in_turn(each)
    credit_s = max(0.0, MEDIUM_BYTES / alone - max(0.0, medium - small))
    return Tier(max(round_s - host_s, 0.0) / 2, alone, together, credit_s)


def _in_turn(each: _Ring) -> tuple[float, float]:
    """Seconds of a message, and of the thread around them."""
    one, several = each.in_turn(1), each.in_turn(TURNS)
    round_s = max(several - one, one / 10) / (TURNS - 1)
    return round_s, max(0.0, one - round_s)


def _ping_pong(group: dist.ProcessGroup, pair: tuple[int, int], size: int) -> float:
    """Seconds of one way, while nobody else sends."""
    rank, room = group.rank(), torch.ones(size // 4)

    def run() -> None:
        if rank == pair[0]:
            dist.send(room, group=group, group_dst=pair[1], tag=_TAG)
            dist.recv(room, group=group, group_src=pair[1], tag=_TAG)
        elif rank == pair[1]:
            dist.recv(room, group=group, group_src=pair[0], tag=_TAG)
            dist.send(room, group=group, group_dst=pair[0], tag=_TAG)

    return timed(group, run, OFTEN if size <= 2**16 else 5).wall_s / 2


def _with_native(wires: Wires, group: dist.ProcessGroup, nodes: Sequence[int]) -> Wires:
    """What the backend's own call and messages take: of an all-reduce of next to nothing that is the whole. The call is
    timed alone; what is left is divided among the rounds, since behind larger messages a round's wait is hidden."""
    ranks = group.size()
    call = _call(group)
    reduced = timed(group, partial(_reduce, Native(group), torch.ones(_SMALL_SHARE_BYTES // 4 * ranks)), OFTEN)
    message_s = (reduced.core_s - call.core_s) / (2 * GLOO_SEGMENTS * (ranks - 1))
    raw_s = wires.host.native_message_s  # from Python, which the backend itself does not take longer than
    host = replace(wires.host, call_s=call.wall_s, native_message_s=min(raw_s, max(message_s, raw_s / 20)))
    return waiting(replace(wires, host=host), reduced.wall_s, nodes)


def waiting(wires: Wires, small_s: float, nodes: Sequence[int]) -> Wires:
    """With as much of a tier's latency in each of the backend's rounds as makes a small all-reduce take so long. Where
    tiers have none to speak of, the rest is its call's."""
    ranks = sum(nodes)

    def with_share(share: float) -> Wires:
        return replace(wires, host=replace(wires.host, native_latency=share))

    def left_s(one: Wires) -> float:
        return small_s - native_s(_SMALL_SHARE_BYTES * ranks, ranks, one, nodes)

    best = min(map(with_share, NATIVE_LATENCIES), key=lambda one: abs(left_s(one)))
    return replace(best, host=replace(best.host, call_s=best.host.call_s + max(0.0, left_s(best))))


def _call(group: dist.ProcessGroup) -> Taken:
    """The backend's all-reduce of a rank alone: to its thread and back."""
    own = dist.get_global_rank(group, group.rank())
    alone = dist.new_group([own], backend="gloo", use_local_synchronization=True)
    one = torch.ones(1)
    taken = timed(group, lambda: dist.all_reduce(one, group=alone), 50)
    dist.destroy_process_group(alone)
    return taken


def _memory(group: dist.ProcessGroup, mine: range) -> Memory | None:
    """Of the ranks of each node among themselves; None where they cannot share any."""
    if len(mine) == 1:
        return None
    try:
        memory = SharedMemory(group, among=mine)
    except InputError:
        return None
    few, tiny = torch.ones(4), torch.ones(8)
    staged_s = timed(group, partial(_reduce, memory, few), 500).wall_s
    sync_s = timed(group, partial(memory.all_gather, tiny, 0), 500).wall_s / 2
    rates: dict[str, list[tuple[int, float]]] = {"reduce": [], "scatter": [], "gather": []}
    for size in MEMORY_BYTES:
        flat = torch.zeros(size // 4)
        repeats = max(3, min(200, 2**25 // size))
        ways: dict[str, Callable[[], object]] = {
            "reduce": partial(_reduce, memory, flat),
            "scatter": partial(memory.reduce_scatter, flat, 0),
            "gather": partial(memory.all_gather, flat, 0),
        }
        for name, run in ways.items():
            wall_s = timed(group, run, repeats).wall_s
            rates[name].append((size, size / max(wall_s - 2 * sync_s, wall_s / 20)))
    dist.barrier(group)
    memory.close()
    return Memory(sync_s, staged_s, **{name: tuple(points) for name, points in rates.items()})


def _reduce(reducer: Reducer, flat: torch.Tensor) -> None:
    reducer.start(flat, 0)
    reducer.finish()

"""Measures the network between ranks, for predicting all-reduces on it: single messages, bursts of messages, and memory
that ranks share.

All ranks call these functions together. The all-reduces that are to be predicted are not used: links are measured with
messages from one rank to another, and hosts by the CPU time of their cores. Only three quantities come from
collectives, at sizes that the benchmark does not have: the time of a call of the backend, the CPU time of a message
within a schedule, and the rates of shared memory.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist

from meshwright.cluster.cores import usable_cores
from meshwright.collectives.native import NativeReducer
from meshwright.collectives.reducer import Reducer
from meshwright.collectives.scheduled import ScheduledReducer
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.threaded import ThreadedReducer
from meshwright.errors import InputError
from meshwright.simulator.communication.cpu_network import CpuNetwork, HostSpeed, LinkTier, SharedMemorySpeed
from meshwright.simulator.communication.schedules import GLOO_SEGMENTS, native_s, schedule_s
from validation.bench.collectives.timing import RunTime, time_run

SMALL_BYTES = 48
MEDIUM_BYTES = 48 * 2**10
LARGE_BYTES = 3 * 2**20
MEMORY_BYTES = tuple(3 * 2**power for power in range(13, 26, 2))
BURST, LARGE_BURST, TURNS, MANY_REPEATS = 32, 8, 5, 60
HALVINGS = 12
NATIVE_LATENCIES = tuple(share / 20 for share in range(1, 401))
_SMALL_SHARE_BYTES = 16  # for each rank, in the smallest all-reduce
_TAG = 7


class _Ring:
    """A ring of ranks, in which all ranks send messages to the next rank at the same time. `ranks` are the ranks of the
    ring that this rank is in."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int]) -> None:
        index = list(ranks).index(group.rank())
        self._group, self._is_single = group, len(ranks) == 1
        self._next, self._previous = ranks[(index + 1) % len(ranks)], ranks[index - 1]

    def send_burst(self, size: int, count: int) -> RunTime:
        """Returns the time per message of a burst, in which each rank sends `count` messages of `size` bytes before it
        waits for any."""
        sent, received = ([torch.ones(size // 4) for _ in range(count)] for _ in range(2))

        def run() -> None:
            if self._is_single:
                return
            works = [dist.irecv(flat, group=self._group, group_src=self._previous, tag=_TAG) for flat in received]
            works += [dist.isend(flat, group=self._group, group_dst=self._next, tag=_TAG) for flat in sent]
            for work in works:
                assert work is not None
                work.wait()

        burst = time_run(self._group, run, 2)
        return RunTime(burst.wall_s / count, burst.core_s / count)

    def send_in_turn(self, count: int) -> float:
        """Returns the seconds of `count` small messages, each of which is sent when the previous one has arrived. They
        are sent from the thread of a reducer, as the messages of a schedule are."""
        sent, received = torch.ones(SMALL_BYTES // 4), torch.empty(SMALL_BYTES // 4)

        def reduce(flat: torch.Tensor, bucket: int) -> None:
            for _ in range(0 if self._is_single else count):
                receiving = dist.irecv(received, group=self._group, group_src=self._previous, tag=_TAG)
                sending = dist.isend(sent, group=self._group, group_dst=self._next, tag=_TAG)
                for work in (receiving, sending):
                    assert work is not None
                    work.wait()

        reducer = ThreadedReducer("in turn", self._group, reduce)
        wall_s = time_run(self._group, partial(_reduce, reducer, sent), MANY_REPEATS).wall_s
        reducer.close()
        return wall_s


def measure_network(group: dist.ProcessGroup, nodes: Sequence[int], machines: int) -> CpuNetwork:
    """Returns the speed of the network between ranks. `nodes` is the number of ranks on each node. Several nodes may be
    on one of the `machines` machines, and then share its cores."""
    rank, node_count = group.rank(), len(nodes)
    first_ranks = [sum(nodes[:node]) for node in range(node_count)]
    node = max(index for index, first in enumerate(first_ranks) if first <= rank)
    node_ranks = range(first_ranks[node], first_ranks[node] + nodes[node])
    opposite_ranks = [first + rank - node_ranks.start for first, count in zip(first_ranks, nodes, strict=True)
                if rank - node_ranks.start < count]  # fmt: skip
    cores = usable_cores() * machines / node_count
    inner, outer = _Ring(group, node_ranks), _Ring(group, opposite_ranks)
    host, message_s = _host_speed(group, inner if nodes[0] > 1 else outer, cores)
    shared_core_s = message_s * max(1.0, nodes[0] / cores)
    within = _link_tier(group, inner, (0, 1), nodes[0], shared_core_s) if nodes[0] > 1 else None
    across = _link_tier(group, outer, (0, first_ranks[1]), min(nodes), shared_core_s) if node_count > 1 else None
    tier = within or across
    assert tier is not None, "one rank has no network"
    network = CpuNetwork(tier, across, host, _shared_memory_speed(group, node_ranks))
    network = _with_schedule_costs(network, group, nodes)
    return _with_native_costs(network, group, nodes)


def _host_speed(group: dist.ProcessGroup, ring_ranks: _Ring, cores: float) -> tuple[HostSpeed, float]:
    """Returns the speed of the host, and the CPU seconds of a plain message. In the former, every kind of message has
    the CPU seconds of a plain message; other functions replace them."""
    message_s = ring_ranks.send_burst(SMALL_BYTES, BURST).core_s
    large_s = ring_ranks.send_burst(LARGE_BYTES, LARGE_BURST).core_s
    first, second = torch.ones(LARGE_BYTES // 4), torch.zeros(LARGE_BYTES // 4)
    host = HostSpeed(
        cores=cores,
        message_s=message_s,
        native_message_s=message_s,
        native_latency=1.0,
        byte_s=max(0.0, large_s - message_s) / LARGE_BYTES,
        thread_s=max(_turn_seconds(ring_ranks)[1], _idle_thread_s(group)),
        call_s=0.0,
        add_bytes_per_s=LARGE_BYTES / time_run(group, lambda: first.add_(second), 10).core_s,
        copy_bytes_per_s=LARGE_BYTES / time_run(group, lambda: first.copy_(second), 10).core_s,
    )
    return host, message_s


def _idle_thread_s(group: dist.ProcessGroup) -> float:
    """Returns the seconds of a call of a reducer whose thread does nothing."""
    idle = ThreadedReducer("idle", group, lambda flat, bucket: None)
    wall_s = time_run(group, partial(_reduce, idle, torch.ones(1)), 50).wall_s
    idle.close()
    return wall_s


def _with_schedule_costs(network: CpuNetwork, group: dist.ProcessGroup, nodes: Sequence[int]) -> CpuNetwork:
    """Returns the network with the measured CPU seconds of a message while a schedule runs."""
    small_bytes = _SMALL_SHARE_BYTES * group.size()
    reducer = ScheduledReducer(group, ring(group.size()))
    ring_time = time_run(group, partial(_reduce, reducer, torch.ones(small_bytes // 4)), MANY_REPEATS)
    dist.barrier(group)
    reducer.close()
    return fit_message_cost(network, ring_time, small_bytes, nodes)


def fit_message_cost(network: CpuNetwork, ring_time: RunTime, small_bytes: int, nodes: Sequence[int]) -> CpuNetwork:
    """Returns the network with the CPU seconds per message with which the predicted time of a small ring all-reduce
    equals the measured time. They are at most the measured CPU time per message. They may be less, because several
    cores work for a rank, and what they do in parallel delays nothing."""
    schedule = ring(sum(nodes))
    low, high = 0.0, ring_time.core_s / (2 * (sum(nodes) - 1))

    def with_message(seconds: float) -> CpuNetwork:
        return replace(network, host=replace(network.host, message_s=seconds))

    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if schedule_s(schedule, small_bytes, with_message(middle), nodes) < ring_time.wall_s:
            low = middle
        else:
            high = middle
    return with_message(high)


def _link_tier(
    group: dist.ProcessGroup, ring_ranks: _Ring, pair: tuple[int, int], count: int, host_s: float
) -> LinkTier:
    """Returns the speed of the links. The latency is that of a message that is sent when the previous one has arrived,
    because Gloo sends a message when the receiver has reported that it is ready. There are two bandwidths: that of a
    single message, and that of all `count` ranks of a node together. The credit is how much less time a medium message
    takes than latency and bandwidth predict."""
    small, medium, large = (_ping_pong(group, pair, size) for size in (SMALL_BYTES, MEDIUM_BYTES, LARGE_BYTES))
    together = count * LARGE_BYTES / ring_ranks.send_burst(LARGE_BYTES, LARGE_BURST).wall_s
    alone = (LARGE_BYTES - MEDIUM_BYTES) / max(large - medium, large / 10)
    round_s, _ = _turn_seconds(ring_ranks)
    credit_s = max(0.0, MEDIUM_BYTES / alone - max(0.0, medium - small))
    return LinkTier(max(round_s - host_s, 0.0) / 2, alone, together, credit_s)


def _turn_seconds(ring_ranks: _Ring) -> tuple[float, float]:
    """Returns the seconds of one message of `send_in_turn`, and the seconds of passing the work to the thread that
    sends them."""
    single_s, several_s = ring_ranks.send_in_turn(1), ring_ranks.send_in_turn(TURNS)
    message_s = max(several_s - single_s, single_s / 10) / (TURNS - 1)
    return message_s, max(0.0, single_s - message_s)


def _ping_pong(group: dist.ProcessGroup, pair: tuple[int, int], size: int) -> float:
    """Returns the seconds of a message from one rank of the pair to the other, while no other rank sends."""
    rank, flat = group.rank(), torch.ones(size // 4)

    def run() -> None:
        if rank == pair[0]:
            dist.send(flat, group=group, group_dst=pair[1], tag=_TAG)
            dist.recv(flat, group=group, group_src=pair[1], tag=_TAG)
        elif rank == pair[1]:
            dist.recv(flat, group=group, group_src=pair[0], tag=_TAG)
            dist.send(flat, group=group, group_dst=pair[0], tag=_TAG)

    return time_run(group, run, MANY_REPEATS if size <= 2**16 else 5).wall_s / 2


def _with_native_costs(network: CpuNetwork, group: dist.ProcessGroup, nodes: Sequence[int]) -> CpuNetwork:
    """Returns the network with the costs of the backend's call and of its messages. A very small all-reduce consists of
    these costs only. The call is timed alone. The remaining CPU time is divided by the number of messages, and the
    remaining wall time determines the latency of the backend's rounds (`fit_native_latency`)."""
    ranks = group.size()
    call = _native_call(group)
    reduced = time_run(
        group, partial(_reduce, NativeReducer(group), torch.ones(_SMALL_SHARE_BYTES // 4 * ranks)), MANY_REPEATS
    )
    message_s = (reduced.core_s - call.core_s) / (2 * GLOO_SEGMENTS * (ranks - 1))
    python_s = network.host.native_message_s  # a message sent from Python, which takes at least as long
    host = replace(network.host, call_s=call.wall_s, native_message_s=min(python_s, max(message_s, python_s / 20)))
    return fit_native_latency(replace(network, host=host), reduced.wall_s, nodes)


def fit_native_latency(network: CpuNetwork, small_s: float, nodes: Sequence[int]) -> CpuNetwork:
    """Returns the network with the `native_latency` that best predicts `small_s`, the measured time of a small
    all-reduce. `native_latency` is the factor by which a link's latency is multiplied in each round of the backend's
    all-reduce. Time that the latency cannot explain is added to the backend's call."""
    ranks = sum(nodes)

    def with_share(share: float) -> CpuNetwork:
        return replace(network, host=replace(network.host, native_latency=share))

    def unexplained_s(candidate: CpuNetwork) -> float:
        return small_s - native_s(_SMALL_SHARE_BYTES * ranks, ranks, candidate, nodes)

    best = min(map(with_share, NATIVE_LATENCIES), key=lambda candidate: abs(unexplained_s(candidate)))
    return replace(best, host=replace(best.host, call_s=best.host.call_s + max(0.0, unexplained_s(best))))


def _native_call(group: dist.ProcessGroup) -> RunTime:
    """Returns the time of the backend's all-reduce in a group of one rank, which only passes the tensor to the
    backend's thread and back."""
    rank = dist.get_global_rank(group, group.rank())
    single_rank = dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    flat = torch.ones(1)
    call = time_run(group, lambda: dist.all_reduce(flat, group=single_rank), 50)
    dist.destroy_process_group(single_rank)
    return call


def _shared_memory_speed(group: dist.ProcessGroup, node_ranks: range) -> SharedMemorySpeed | None:
    """Returns the speed of memory that the ranks of a node share; None if they cannot share memory."""
    if len(node_ranks) == 1:
        return None
    try:
        memory = SharedMemoryReducer(group, among=node_ranks)
    except InputError:
        return None
    staged_s = time_run(group, partial(_reduce, memory, torch.ones(4)), 500).wall_s
    sync_s = time_run(group, partial(memory.all_gather, torch.ones(8), 0), 500).wall_s / 2
    rates: dict[str, list[tuple[int, float]]] = {"reduce": [], "scatter": [], "gather": []}
    for size in MEMORY_BYTES:
        flat = torch.zeros(size // 4)
        repeats = max(3, min(200, 2**25 // size))
        functions: dict[str, Callable[[], object]] = {
            "reduce": partial(_reduce, memory, flat),
            "scatter": partial(memory.reduce_scatter, flat, 0),
            "gather": partial(memory.all_gather, flat, 0),
        }
        for name, run in functions.items():
            wall_s = time_run(group, run, repeats).wall_s
            rates[name].append((size, size / max(wall_s - 2 * sync_s, wall_s / 20)))
    dist.barrier(group)
    memory.close()
    return SharedMemorySpeed(sync_s, staged_s, **{name: tuple(points) for name, points in rates.items()})


def _reduce(reducer: Reducer, flat: torch.Tensor) -> None:
    reducer.start(flat, 0)
    reducer.finish()

"""Seconds that CPU ranks need to average a tensor: with a schedule, with the backend's own all-reduce, and through
shared memory. combining.py uses this module for plans, and `bench collectives` compares its predictions with
measurements.

A tensor of S bytes on n ranks, k of them on a node:

    schedule    = thread_s + S / add (the division by n) + the replay of the schedule           schedule_s
    native      = call_s + S / add + a ring of Gloo's segments: at least two of a chunk, at most 1 MiB each; their
                  latency is `native_latency` times that of Python's messages                   native_s
    shared      = 2 sync_s + S / reduce(S); up to 8 KiB staged_s + (n + 2) S / copy             shared_memory_s
    two levels  = thread_s + 2 sync_s + S / scatter(S) + the schedules between nodes, of S / k each, k at once
                  + 2 sync_s + S / gather(S)                                                    two_level_memory_s
    cheapest    = the fastest of them                                                           cheapest_algorithm
"""

from collections.abc import Sequence
from functools import lru_cache

from meshwright.collectives.execute import SEGMENT_BYTES
from meshwright.collectives.schedules.builders import SCHEDULES, build
from meshwright.collectives.schedules.ring import ring
from meshwright.collectives.schedules.schedule import Schedule, placed, side_by_side
from meshwright.collectives.schedules.two_level import across_nodes
from meshwright.collectives.shared_memory.steps import STAGE_UP_TO_BYTES
from meshwright.errors import InputError
from meshwright.simulator.communication.cpu_network import CpuNetwork, HostSpeed, SharedMemorySpeed, rate_at
from meshwright.simulator.communication.schedule_replay import ScheduleExecution, replay_schedule_s

# kMaxSegmentSize of `AllreduceOptions` in gloo/allreduce.h; two segments are in flight at all times. torch leaves the
# algorithm unspecified, in which case gloo/allreduce.cc uses a ring.
GLOO_SEGMENT_BYTES = 2**20
GLOO_SEGMENTS = 2  # the least number of segments of a rank's chunk: one is sent while the other is added
MOST_RANKS = 64  # larger groups are not replayed message by message: 64 ranks in a ring already send 16,000 messages


def schedule_s(schedule: Schedule, size_bytes: int, network: CpuNetwork, nodes: Sequence[int] | None = None) -> float:
    """Seconds of the reducer that executes this schedule. `nodes` has the number of ranks on each node, in the order of
    ranks; None means that all ranks are on one node."""
    if schedule.ranks == 1 or not size_bytes:
        return 0.0
    host = network.host
    execution = ScheduleExecution(SEGMENT_BYTES, host.message_s)
    replay_s = replay_schedule_s(schedule, size_bytes, execution, network, _node_of(schedule.ranks, nodes))
    return host.thread_s + size_bytes / host.add_bytes_per_s + replay_s


def native_s(size_bytes: int, ranks: int, network: CpuNetwork, nodes: Sequence[int] | None = None) -> float:
    """Seconds of Gloo's own all-reduce, including the division by the number of ranks before it."""
    if ranks == 1 or not size_bytes:
        return 0.0
    host = network.host
    execution = _gloo_execution(size_bytes, ranks, host)
    replay_s = replay_schedule_s(_ring(ranks), size_bytes, execution, network, _node_of(ranks, nodes))
    return host.call_s + size_bytes / host.add_bytes_per_s + replay_s


def shared_memory_s(size_bytes: int, ranks: int, network: CpuNetwork) -> float:
    """Seconds to average a tensor between ranks of one node through shared memory."""
    if ranks == 1 or not size_bytes:
        return 0.0
    memory = _shared_memory(network)
    if size_bytes <= STAGE_UP_TO_BYTES:
        return memory.staged_s + (ranks + 2) * size_bytes / network.host.copy_bytes_per_s
    return 2 * memory.sync_s + size_bytes / rate_at(memory.reduce, size_bytes)


def two_level_memory_s(size_bytes: int, nodes: Sequence[int], network: CpuNetwork) -> float:
    """Seconds to average a tensor through shared memory within nodes and messages between nodes. Each node must have
    the same number of ranks, at least two."""
    node_count, (ranks,) = len(nodes), set(nodes)
    memory, host, slice_bytes = _shared_memory(network), network.host, -(-size_bytes // ranks)
    within_s = 4 * memory.sync_s + sum(
        size_bytes / rate_at(rates, size_bytes) for rates in (memory.scatter, memory.gather)
    )
    execution = ScheduleExecution(SEGMENT_BYTES, host.message_s)
    schedule = _slice_schedules(node_count, ranks)
    replay_s = replay_schedule_s(schedule, size_bytes, execution, network, _node_of(ranks * node_count, nodes))
    return host.thread_s + within_s + slice_bytes / host.add_bytes_per_s + replay_s


def _shared_memory(network: CpuNetwork) -> SharedMemorySpeed:
    if network.memory is None:
        raise InputError("these ranks cannot share memory: price another algorithm")
    return network.memory


def algorithm_prices(size_bytes: int, ranks: int, nodes: Sequence[int], network: CpuNetwork) -> dict[str, float]:
    """The seconds of every algorithm that can average a tensor between these ranks, by the algorithm's name. `nodes`
    has the number of ranks on each node."""
    if sum(nodes) != ranks:
        raise InputError(f"nodes of {list(nodes)} ranks are {sum(nodes)} ranks, but {ranks} combine their gradients")
    seconds = {"native": native_s(size_bytes, ranks, network, nodes)}
    for name in SCHEDULES:
        if name != "two_level" or len(nodes) > 1:
            seconds[name] = schedule_s(_built(name, ranks, tuple(nodes)), size_bytes, network, nodes)
    if network.memory is None:
        return seconds
    if len(nodes) == 1:
        seconds["shared_memory"] = shared_memory_s(size_bytes, ranks, network)
    elif len(set(nodes)) == 1 and nodes[0] > 1:
        seconds["two_level_memory"] = two_level_memory_s(size_bytes, nodes, network)
    return seconds


def cheapest_algorithm(size_bytes: int, ranks: int, nodes: Sequence[int], network: CpuNetwork) -> tuple[str, float]:
    """The name of the fastest algorithm (`native`, a schedule's name, `shared_memory` or `two_level_memory`), and its
    seconds."""
    seconds = algorithm_prices(size_bytes, ranks, nodes, network)
    fastest = min(seconds, key=seconds.__getitem__)
    return fastest, seconds[fastest]


def _gloo_execution(size_bytes: int, ranks: int, host: HostSpeed) -> ScheduleExecution:
    segments = max(-(-size_bytes // GLOO_SEGMENT_BYTES), GLOO_SEGMENTS * ranks)
    segments_of_chunk = -(-segments // ranks)
    segment_bytes = max(1, -(-size_bytes // (ranks * segments_of_chunk)))
    return ScheduleExecution(segment_bytes, host.native_message_s, host.native_latency)


def _node_of(ranks: int, nodes: Sequence[int] | None) -> list[int]:
    """The node of each rank."""
    return [node for node, count in enumerate(nodes or [ranks]) for _ in range(count)]


@lru_cache(maxsize=64)
def _built(name: str, ranks: int, nodes: tuple[int, ...]) -> Schedule:
    return build(name, ranks, nodes)


@lru_cache(maxsize=64)
def _ring(ranks: int) -> Schedule:
    return ring(ranks)


@lru_cache(maxsize=64)
def _slice_schedules(nodes: int, per_node: int) -> Schedule:
    """A schedule that runs one all-reduce between nodes for each local rank at the same time. The ranks with the same
    local rank combine the same slice of the tensor."""
    between = across_nodes(nodes)
    rounds = side_by_side(
        *(placed(between, range(slot, nodes * per_node, per_node), slot * between.chunks) for slot in range(per_node))
    )
    return Schedule("slots", nodes * per_node, between.chunks * per_node, tuple(rounds))

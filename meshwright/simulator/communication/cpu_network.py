"""`CpuNetwork`: the speeds that collectives of CPU ranks are priced with, of links, of cores and of shared memory. A
benchmark measures them (bench/collectives), or combining.py derives them from a cluster."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

RatePoints = tuple[tuple[int, float], ...]  # (bytes of a tensor, bytes processed per second at that size)


@dataclass(frozen=True)
class LinkTier:
    """The link within a node, or between two: the latency and bandwidth of one message that is sent alone, and the
    bandwidth that all messages between the same two nodes (or within one) share. Traffic shapers of clouds let the
    first bytes through at once after a pause: they save up to `credit_s`, which idle time restores."""

    latency_s: float
    bandwidth_bytes_per_s: float
    together_bytes_per_s: float
    credit_s: float = 0.0


@dataclass(frozen=True)
class HostSpeed:
    """What a node's cores need for communication, in seconds of one core: `message_s` for the send and the receive of a
    message from Python, `native_message_s` by the backend itself, `byte_s` for a byte; `thread_s` to pass a tensor to a
    reducer's thread and to learn of its end, `call_s` the same for the backend. A core adds and copies so many bytes
    per second. Messages of the backend have `native_latency` times the latency of a tier."""

    cores: float
    message_s: float
    native_message_s: float
    native_latency: float
    byte_s: float
    thread_s: float
    call_s: float
    add_bytes_per_s: float
    copy_bytes_per_s: float


@dataclass(frozen=True)
class SharedMemorySpeed:
    """Shared memory between the ranks of a node: `sync_s` until every rank knows that all have arrived, `staged_s`
    for a tensor of no size that is copied through a buffer, and the rates at which whole tensors are reduced, only
    summed in slices, or only gathered, after that waiting."""

    sync_s: float
    staged_s: float
    reduce: RatePoints
    scatter: RatePoints
    gather: RatePoints


@dataclass(frozen=True)
class CpuNetwork:
    """`memory` is None where the ranks of a node cannot share memory, `across` where there is only one node."""

    within: LinkTier
    across: LinkTier | None
    host: HostSpeed
    memory: SharedMemorySpeed | None


def rate_at(points: RatePoints, size_bytes: float) -> float:
    """The rate at a size: between measured sizes on a straight line in log(bytes) and log(rate), outside of them that
    of the nearest one."""
    place = bisect_left([size for size, _ in points], size_bytes)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (small, slow), (large, fast) = points[place - 1], points[place]
    share = log(size_bytes / small) / log(large / small)
    return slow * exp(share * log(fast / slow))

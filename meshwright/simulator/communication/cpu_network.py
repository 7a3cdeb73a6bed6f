"""`CpuNetwork`: the speeds of links, cores and shared memory from which the time of collectives between CPU ranks is
predicted. A benchmark measures them (bench/collectives), or combining.py derives them from a cluster."""

from bisect import bisect_left
from dataclasses import dataclass
from math import exp, log

RatePoints = tuple[tuple[int, float], ...]  # (bytes of a tensor, bytes processed per second at that size)


@dataclass(frozen=True)
class LinkTier:
    """The link within a node, or between two nodes: `latency_s` and `bandwidth_bytes_per_s` of a message that is sent
    alone, and the bandwidth `together_bytes_per_s` that all messages between the same two nodes (or within one) share.
    Traffic shapers of clouds let the first bytes after a pause through at once, which saves up to `credit_s`; idle time
    restores this credit."""

    latency_s: float
    bandwidth_bytes_per_s: float
    together_bytes_per_s: float
    credit_s: float = 0.0


@dataclass(frozen=True)
class HostSpeed:
    """What communication costs the cores of a node, in seconds of one core: `message_s` for sending and receiving a
    message from Python, `native_message_s` for a message that the backend sends itself, `byte_s` per byte of a message,
    `thread_s` for passing a tensor to a reducer's thread and being notified when it is done, `call_s` the same for a
    call of the backend. A core adds `add_bytes_per_s` and copies `copy_bytes_per_s`. A message of the backend has
    `native_latency` times the latency of a `LinkTier`."""

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
    """Shared memory between the ranks of a node. `sync_s` is the time of a barrier, `staged_s` that of combining an
    empty tensor that is copied through a buffer. The rates apply to the whole tensor and do not include barriers:
    `reduce` for an all-reduce, `scatter` for its first half, which sums one slice per rank, and `gather` for its second
    half."""

    sync_s: float
    staged_s: float
    reduce: RatePoints
    scatter: RatePoints
    gather: RatePoints


@dataclass(frozen=True)
class CpuNetwork:
    """The speeds of a network of CPU ranks. `across` is None if there is only one node, `memory` is None if the ranks
    of a node cannot share memory."""

    within: LinkTier
    across: LinkTier | None
    host: HostSpeed
    memory: SharedMemorySpeed | None


def rate_at(points: RatePoints, size_bytes: float) -> float:
    """The rate at a size. Between two measured sizes it lies on a straight line in log(bytes) and log(rate); outside of
    the measured sizes it is the rate of the nearest one."""
    place = bisect_left([size for size, _ in points], size_bytes)
    if place in (0, len(points)):
        return points[min(place, len(points) - 1)][1]
    (small, slow), (large, fast) = points[place - 1], points[place]
    share = log(size_bytes / small) / log(large / small)
    return slow * exp(share * log(fast / slow))

"""How many bytes this rank sends to other ranks, as the kernel and the collectives count them."""

import os
import socket
import struct
import sys
from contextlib import suppress

from torch import Tensor

from meshwright.collectives.shared_memory.reducer import SharedMemoryReducer
from meshwright.collectives.shared_memory.steps import ALL_REDUCE

_TCP_INFO = 11  # the number of Linux, which Python does not name on all systems
_BYTES_ACKED, _BYTES_RECEIVED = 120, 128  # where struct tcp_info of Linux has them


class ExchangeCounter:
    """Counts what this process exchanges from its creation on: what its TCP connections send, and what collectives in
    shared memory read from and write to other ranks. `counts_received` adds what the connections receive, for processes
    whose peers do not count."""

    def __init__(self, counts_received: bool = False) -> None:
        self._counts_received = counts_received
        self._shared_bytes = 0.0
        self._count_shared_memory()
        self.start()

    def start(self) -> None:
        """Counts from now on."""
        self._before = self._tcp_bytes()
        self._shared_bytes = 0.0

    def bytes(self) -> float | None:
        """Returns the bytes since the start; None on systems that do not count them."""
        now = self._tcp_bytes()
        return None if now is None or self._before is None else now - self._before + self._shared_bytes

    def _tcp_bytes(self) -> int | None:
        if sys.platform != "linux":
            return None
        total = 0
        for name in _open_sockets():
            with suppress(OSError), socket.socket(fileno=os.dup(name)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                information = connection.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BYTES_RECEIVED + 8)
                if len(information) < _BYTES_RECEIVED + 8:
                    return None
                total += struct.unpack_from("=Q", information, _BYTES_ACKED)[0]
                if self._counts_received:
                    total += struct.unpack_from("=Q", information, _BYTES_RECEIVED)[0]
        return total

    def _count_shared_memory(self) -> None:
        """A collective of n bytes in p ranks' shared memory reads (p-1)/p n of other ranks' memory; an all-reduce
        writes as many."""
        original = SharedMemoryReducer._start

        def start(reducer: SharedMemoryReducer, flat: Tensor, bucket: int, verb: int, *, mean: bool) -> None:
            others = (len(reducer.ranks) - 1) / len(reducer.ranks)
            self._shared_bytes += others * flat.numel() * flat.element_size() * (2 if verb == ALL_REDUCE else 1)
            original(reducer, flat, bucket, verb, mean=mean)

        SharedMemoryReducer._start = start  # type: ignore[assignment, method-assign]


def _open_sockets() -> list[int]:
    """Returns the file descriptors of this process that are sockets."""
    sockets = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                sockets.append(int(name))
    return sockets

"""How ranks on one machine combine tensors in shared memory: the steps that `shared_memory.c` takes.

A rank publishes its tensor. Once all have, each rank adds its own slice over all ranks' tensors, in the order of the
ranks, writes the result into all of them, and says that it is done. So there are two moments at which ranks wait for
each other, whatever the size, and nothing is copied. Small tensors are copied into the segment instead, and every rank
adds all of them for itself: one moment less. `plain_memory.py` takes the same steps without the helper.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.collectives.shared_memory.segment import LINE_WORDS, Descriptor, Segment

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = range(3)
VERBS = ("all-reduce", "reduce-scatter", "all-gather")
FINISHED, WAITING, MISMATCH, UNREACHABLE = range(4)
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4}

# Measured with two ranks on two cores (Neoverse-N1): 1 KiB takes 6.8 µs copied and 9.1 µs in place, 8 KiB 9.1 and 9.4,
# 16 KiB 11.2 and 9.8; on one core both take as long up to 8 KiB.
STAGE_UP_TO_BYTES = 8192
# Looks before a core is offered to others. 1 KiB takes 6.8 µs on two cores with any number from 50 to 3,000; with both
# ranks on one core 42 µs with 50, 81 with 1,000, 161 with 3,000.
SPINS = 50


class Steps(Protocol):
    """Takes the steps of a group's collectives. After an answer other than FINISHED, `blamed` (a rank of the group),
    `sequence` (which collective) and `error` (of the system) say more."""

    stage_up_to_bytes: int

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        """Publishes the next collective, and does of it and of earlier ones what needs no waiting."""

    def wait(self, sequence: int) -> int:
        """Finishes all collectives up to that one, or answers WAITING after a tenth of a second."""

    def why(self) -> tuple[int, int, int]:
        """(blamed, sequence, error)"""

    def mappings(self) -> int:
        """How many tensors of the peers are open."""

    def close(self) -> None: ...


class _Group(ctypes.Structure):
    """The beginning of the helper's own."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("rank", "ranks", "spins", "started", "reduced", "finished", "blamed", "sequence", "error")
    ]


class Compiled:
    """The steps in C; Python's other threads run meanwhile."""

    def __init__(self, helper: ctypes.CDLL, rank: int, segments: Sequence[Segment], pids: Sequence[int]) -> None:
        ranks = len(segments)
        helper.group_new.restype = ctypes.POINTER(_Group)
        helper.group_mappings.restype = ctypes.c_int64
        addresses = (ctypes.c_void_p * ranks)(*(ctypes.addressof(segment) for segment in segments))
        numbers = (ctypes.c_int64 * ranks)(*pids)
        word = ctypes.c_int64
        group = helper.group_new(word(rank), word(ranks), addresses, numbers, word(SPINS))
        if not group:
            raise MemoryError("no memory for a group of ranks")
        self.stage_up_to_bytes = STAGE_UP_TO_BYTES
        self._helper, self._group, self._segments = helper, group, segments
        self._start, self._wait = helper.group_start, helper.group_wait
        self._start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._address = ctypes.addressof(group.contents)

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        answer: int = self._start(self._address, ctypes.addressof(descriptor), tensor.data_ptr())
        return answer

    def wait(self, sequence: int) -> int:
        answer: int = self._wait(self._address, sequence)
        return answer

    def why(self) -> tuple[int, int, int]:
        group = self._group.contents
        return group.blamed, group.sequence, group.error

    def mappings(self) -> int:
        found: int = self._helper.group_mappings(self._group)
        return found

    def close(self) -> None:
        self._helper.group_free(self._group)


def slice_begin(count: int, item_bytes: int, rank: int, ranks: int) -> int:
    """Where the slice of a rank begins, and that of the rank before it ends: whole lines, so that no two ranks write
    to one."""
    unit = LINE_WORDS * 8 // item_bytes
    return min(-(-count // unit) * rank // ranks * unit, count)

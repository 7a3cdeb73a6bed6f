"""The steps in which ranks on one machine combine tensors in shared memory. `CompiledSteps` runs them in
`shared_memory.c`, `python_steps.py` in Python.

An all-reduce: each rank publishes where its tensor is. Once all ranks have done so, each rank adds up one slice of all
ranks' tensors in the order of the ranks, writes the result into all of the tensors, and publishes that it is done.
Ranks thus wait for each other twice, whatever the size, and no tensor is copied. Small tensors are copied into the
segment instead, and every rank adds up all of them for itself, which needs one wait less.
"""

import ctypes
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.collectives.shared_memory.segment import LINE_WORDS, Descriptor, SharedSegment

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = range(3)
VERBS = ("all-reduce", "reduce-scatter", "all-gather")
FINISHED, WAITING, MISMATCH, UNREACHABLE = range(4)
TYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3, torch.int64: 4}

# Tensors up to this size are copied into the segment. Measured with two ranks on two cores (Neoverse-N1): 1 KiB takes
# 6.8 µs copied and 9.1 µs in place, 8 KiB 9.1 and 9.4, 16 KiB 11.2 and 9.8. With both ranks on one core, copied and in
# place take equally long up to 8 KiB.
STAGE_UP_TO_BYTES = 8192
# How often a rank polls before it yields its core. 1 KiB takes 6.8 µs on two cores with any number from 50 to 3,000;
# with both ranks on one core 42 µs with 50, 81 with 1,000, 161 with 3,000.
SPINS = 50


class CollectiveSteps(Protocol):
    """Runs one rank's steps of a group's collectives. Tensors of up to `stage_up_to_bytes` are copied into the segment.

    `start` and `wait` return FINISHED, WAITING (some rank is late), MISMATCH (ranks started different collectives) or
    UNREACHABLE (a rank's memory cannot be opened). After a result other than FINISHED, `why` says more.
    """

    stage_up_to_bytes: int

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        """Publishes the next collective. Then runs the steps, of this collective and of earlier ones, that need no
        waiting."""

    def wait(self, sequence: int) -> int:
        """Finishes all collectives up to number `sequence`, or returns WAITING after a tenth of a second."""

    def why(self) -> tuple[int, int, int]:
        """Returns (rank, sequence, errno) of the last result that was not FINISHED: the rank that is to blame, the
        number of the collective, and the system's error number (0 if there is none)."""

    def mappings(self) -> int:
        """Returns the number of storages of other ranks that this rank has mapped."""

    def close(self) -> None: ...


class _Group(ctypes.Structure):
    """The first fields of `Group` in shared_memory.c."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in ("rank", "ranks", "spins", "started", "reduced", "finished", "blamed", "sequence", "error")
    ]


class CompiledSteps:
    """Implements `CollectiveSteps` in C (`shared_memory.c`), without holding the interpreter lock."""

    def __init__(self, helper: ctypes.CDLL, rank: int, segments: Sequence[SharedSegment], pids: Sequence[int]) -> None:
        ranks = len(segments)
        helper.group_new.restype = ctypes.POINTER(_Group)
        helper.group_mappings.restype = ctypes.c_int64
        addresses = (ctypes.c_void_p * ranks)(*(ctypes.addressof(segment) for segment in segments))
        process_ids = (ctypes.c_int64 * ranks)(*pids)
        int64 = ctypes.c_int64
        group = helper.group_new(int64(rank), int64(ranks), addresses, process_ids, int64(SPINS))
        if not group:
            raise MemoryError("no memory for a group of ranks")
        self.stage_up_to_bytes = STAGE_UP_TO_BYTES
        self._helper, self._group, self._segments = helper, group, segments
        self._start, self._wait = helper.group_start, helper.group_wait
        self._start.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
        self._wait.argtypes = [ctypes.c_void_p, ctypes.c_int64]
        self._address = ctypes.addressof(group.contents)

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        state: int = self._start(self._address, ctypes.addressof(descriptor), tensor.data_ptr())
        return state

    def wait(self, sequence: int) -> int:
        state: int = self._wait(self._address, sequence)
        return state

    def why(self) -> tuple[int, int, int]:
        group = self._group.contents
        return group.blamed, group.sequence, group.error

    def mappings(self) -> int:
        count: int = self._helper.group_mappings(self._group)
        return count

    def close(self) -> None:
        self._helper.group_free(self._group)


def slice_begin(count: int, item_bytes: int, rank: int, ranks: int) -> int:
    """Returns the index at which a rank's slice of a tensor of `count` elements begins and the slice of the rank before
    it ends. Slices begin at multiples of `LINE_WORDS` words, so that no two ranks write to the same cache line."""
    unit = LINE_WORDS * 8 // item_bytes
    return min(-(-count // unit) * rank // ranks * unit, count)

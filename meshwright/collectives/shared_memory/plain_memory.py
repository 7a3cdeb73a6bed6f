"""The steps of `shared_memory.c` in Python and torch, for machines without a C compiler whose processor shows writes in
the order in which they were made."""

import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.collectives.shared_memory.segment import RING, Descriptor, Segment
from meshwright.collectives.shared_memory.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    FINISHED,
    MISMATCH,
    TYPES,
    UNREACHABLE,
    WAITING,
    slice_begin,
)

_BLOCK = 65536  # elements that stay in a cache while all ranks' are added
_LOOKS, _PATIENCE_S, _NAP_S = 200, 0.1, 50e-6
_AGREED = ("count", "type", "verb", "mean", "staged", "bucket")
_DTYPES = {number: dtype for dtype, number in TYPES.items()}


class Plain:
    """`fence` is called between memory and the counter that speaks of it: on a processor that keeps the order of
    writes it may do nothing."""

    stage_up_to_bytes = 0

    def __init__(
        self, rank: int, segments: Sequence[Segment], pids: Sequence[int], fence: Callable[[], object] = lambda: None
    ) -> None:
        self._rank, self._segments, self._pids, self._fence = rank, segments, pids, fence
        self._started = self._reduced = 0
        self._own: dict[int, Tensor] = {}
        self._open: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}  # by rank and slot: generation, memory
        self._retired = [0] * len(segments)
        self._why = (0, 0, 0)

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        mine = self._segments[self._rank]
        self._started += 1
        mine.ring[self._started % RING] = descriptor
        self._own[self._started] = tensor
        self._fence()
        mine.published = self._started
        return self._advance(self._started, waits=False)

    def wait(self, sequence: int) -> int:
        return self._advance(sequence, waits=True) or self._await("done", sequence)

    def why(self) -> tuple[int, int, int]:
        return self._why

    def mappings(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._open.clear()

    def _advance(self, until: int, *, waits: bool) -> int:
        while self._reduced < until:
            sequence = self._reduced + 1
            if waits:
                if answer := self._await("published", sequence):
                    return answer
            elif self._lagging("published", sequence) is not None:
                return FINISHED
            self._fence()
            if answer := self._combine(sequence):
                return answer
            del self._own[sequence]
            self._reduced = sequence
            self._fence()
            self._segments[self._rank].done = sequence
        return FINISHED

    def _lagging(self, counter: str, sequence: int) -> int | None:
        late = (rank for rank, segment in enumerate(self._segments) if getattr(segment, counter) < sequence)
        return next(late, None)

    def _await(self, counter: str, sequence: int) -> int:
        looks, deadline = 0, 0.0
        while (rank := self._lagging(counter, sequence)) is not None:
            looks += 1
            if looks < _LOOKS:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline = deadline or now + _PATIENCE_S
            if now > deadline:
                self._why = (rank, sequence, 0)
                return WAITING
            time.sleep(_NAP_S)
        self._fence()
        return FINISHED

    def _combine(self, sequence: int) -> int:
        rank, ranks = self._rank, len(self._segments)
        described: list[Descriptor] = [segment.ring[sequence % RING] for segment in self._segments]
        mine = described[rank]
        for peer, theirs in enumerate(described):
            if any(getattr(mine, name) != getattr(theirs, name) for name in _AGREED):
                self._why = (peer, sequence, 0)
                return MISMATCH
        if mine.count == 0:
            return FINISHED
        tensors = []
        for peer, theirs in enumerate(described):
            try:
                tensors.append(self._own[sequence].view(-1) if peer == rank else self._reach(peer, theirs))
            except OSError as error:
                self._why = (peer, sequence, error.errno or 0)
                return UNREACHABLE
        item = tensors[0].element_size()
        bounds = [slice_begin(mine.count, item, r, ranks) for r in range(ranks + 1)]
        if mine.verb == ALL_GATHER:
            for peer, tensor in enumerate(tensors):
                if peer != rank:
                    tensors[rank][bounds[peer] : bounds[peer + 1]] = tensor[bounds[peer] : bounds[peer + 1]]
        else:
            targets = tensors if mine.verb == ALL_REDUCE else [tensors[rank]]
            _reduce(tensors, targets, bounds[rank], bounds[rank + 1], mean=bool(mine.mean))
        return FINISHED

    def _reach(self, peer: int, theirs: Descriptor) -> Tensor:
        self._drop_stale(peer)
        key = (peer, theirs.slot)
        if key not in self._open or self._open[key][0] != theirs.generation:
            file = os.open(f"/proc/{self._pids[peer]}/fd/{theirs.file_descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._open[key] = (theirs.generation, mmap.mmap(file, theirs.file_bytes))
            finally:
                os.close(file)
        memory = self._open[key][1]
        return torch.frombuffer(memory, dtype=_DTYPES[theirs.type], count=theirs.count, offset=theirs.offset)

    def _drop_stale(self, peer: int) -> None:
        segment = self._segments[peer]
        if segment.retired != self._retired[peer]:
            self._retired[peer] = segment.retired
            for key in [key for key, known in self._open.items() if key[0] == peer]:
                if self._open[key][0] != segment.generations[key[1]]:
                    del self._open[key]


def _reduce(tensors: list[Tensor], targets: list[Tensor], begin: int, end: int, *, mean: bool) -> None:
    """The sum in the order of the ranks, 16-bit types in fp32 and rounded once, then divided."""
    wide = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    for at in range(begin, end, _BLOCK):
        part = slice(at, min(at + _BLOCK, end))
        total = tensors[0][part].to(wide, copy=True)
        for tensor in tensors[1:]:
            total += tensor[part]
        if mean:
            total /= len(tensors)
        for target in targets:
            target[part] = total

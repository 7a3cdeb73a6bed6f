"""`PythonSteps`: the steps of `shared_memory.c` in Python and torch, for machines without a C compiler. Without memory
barriers (`fence`), the processor has to keep the order of writes."""

import mmap
import os
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.collectives.shared_memory.segment import RING, Descriptor, SharedSegment
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

_BLOCK = 65536  # number of elements that are added at once, few enough for the cache
_YIELDS, _LONGEST_WAIT_S, _SLEEP_S = 200, 0.1, 50e-6
_FIELDS_THAT_AGREE = ("count", "type", "verb", "mean", "staged", "bucket")
_DTYPES = {number: dtype for dtype, number in TYPES.items()}


class PythonSteps:
    """Implements `CollectiveSteps` in Python. `fence` is a memory barrier. It is called after a tensor is written and
    before the counter that publishes it, and after a counter is read and before the tensor. It may do nothing on a
    processor that keeps the order of writes."""

    stage_up_to_bytes = 0

    def __init__(
        self,
        rank: int,
        segments: Sequence[SharedSegment],
        pids: Sequence[int],
        fence: Callable[[], object] = lambda: None,
    ) -> None:
        self._rank, self._segments, self._pids, self._fence = rank, segments, pids, fence
        self._started = self._reduced = 0
        self._tensors: dict[int, Tensor] = {}
        self._mapped: dict[tuple[int, int], tuple[int, mmap.mmap]] = {}  # (generation, memory) by (rank, slot)
        self._retired = [0] * len(segments)
        self._why = (0, 0, 0)

    def start(self, descriptor: Descriptor, tensor: Tensor) -> int:
        mine = self._segments[self._rank]
        self._started += 1
        mine.ring[self._started % RING] = descriptor
        self._tensors[self._started] = tensor
        self._fence()
        mine.published = self._started
        return self._advance(self._started, waits=False)

    def wait(self, sequence: int) -> int:
        return self._advance(sequence, waits=True) or self._await("done", sequence)

    def why(self) -> tuple[int, int, int]:
        return self._why

    def mappings(self) -> int:
        return len(self._mapped)

    def close(self) -> None:
        self._mapped.clear()

    def _advance(self, until: int, *, waits: bool) -> int:
        while self._reduced < until:
            sequence = self._reduced + 1
            if waits:
                if state := self._await("published", sequence):
                    return state
            elif self._lagging("published", sequence) is not None:
                return FINISHED
            self._fence()
            if state := self._combine(sequence):
                return state
            del self._tensors[sequence]
            self._reduced = sequence
            self._fence()
            self._segments[self._rank].done = sequence
        return FINISHED

    def _lagging(self, counter: str, sequence: int) -> int | None:
        """Returns the first rank whose counter is below `sequence`; None if all counters have reached it."""
        late = (rank for rank, segment in enumerate(self._segments) if getattr(segment, counter) < sequence)
        return next(late, None)

    def _await(self, counter: str, sequence: int) -> int:
        """Waits until the counters of all ranks have reached `sequence`. Returns FINISHED, or WAITING if that takes
        longer than a tenth of a second."""
        polls, deadline = 0, 0.0
        while (rank := self._lagging(counter, sequence)) is not None:
            polls += 1
            if polls < _YIELDS:
                os.sched_yield()
                continue
            now = time.monotonic()
            deadline = deadline or now + _LONGEST_WAIT_S
            if now > deadline:
                self._why = (rank, sequence, 0)
                return WAITING
            time.sleep(_SLEEP_S)
        self._fence()
        return FINISHED

    def _combine(self, sequence: int) -> int:
        """Runs this rank's share of one collective, once all ranks have published their tensors for it. Returns
        FINISHED, MISMATCH or UNREACHABLE."""
        rank, ranks = self._rank, len(self._segments)
        descriptors: list[Descriptor] = [segment.ring[sequence % RING] for segment in self._segments]
        mine = descriptors[rank]
        for peer, theirs in enumerate(descriptors):
            if any(getattr(mine, name) != getattr(theirs, name) for name in _FIELDS_THAT_AGREE):
                self._why = (peer, sequence, 0)
                return MISMATCH
        if mine.count == 0:
            return FINISHED
        tensors = []
        for peer, theirs in enumerate(descriptors):
            try:
                tensors.append(self._tensors[sequence].view(-1) if peer == rank else self._map_tensor(peer, theirs))
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

    def _map_tensor(self, peer: int, theirs: Descriptor) -> Tensor:
        """Returns the tensor of a peer, mapped into this process."""
        self._unmap_retired(peer)
        key = (peer, theirs.slot)
        if key not in self._mapped or self._mapped[key][0] != theirs.generation:
            file = os.open(f"/proc/{self._pids[peer]}/fd/{theirs.file_descriptor}", os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapped[key] = (theirs.generation, mmap.mmap(file, theirs.file_bytes))
            finally:
                os.close(file)
        memory = self._mapped[key][1]
        return torch.frombuffer(memory, dtype=_DTYPES[theirs.type], count=theirs.count, offset=theirs.offset)

    def _unmap_retired(self, peer: int) -> None:
        """Unmaps the storages of the peer that the peer itself no longer shares."""
        segment = self._segments[peer]
        if segment.retired != self._retired[peer]:
            self._retired[peer] = segment.retired
            for key in [key for key in self._mapped if key[0] == peer]:
                if self._mapped[key][0] != segment.generations[key[1]]:
                    del self._mapped[key]


def _reduce(tensors: list[Tensor], targets: list[Tensor], begin: int, end: int, *, mean: bool) -> None:
    """Writes the sum or mean of the elements from `begin` to `end` of all tensors into the targets. Tensors are added
    in the order of the ranks; 16-bit types are added in fp32 and rounded once."""
    sum_dtype = torch.float32 if tensors[0].dtype in (torch.bfloat16, torch.float16) else tensors[0].dtype
    for block_begin in range(begin, end, _BLOCK):
        block = slice(block_begin, min(block_begin + _BLOCK, end))
        total = tensors[0][block].to(sum_dtype, copy=True)
        for tensor in tensors[1:]:
            total += tensor[block]
        if mean:
            total /= len(tensors)
        for target in targets:
            target[block] = total

"""`SharedMemory`: averages tensors of ranks on one machine in place, without copying them and without threads."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.shared_memory import fences, segment
from meshwright.collectives.shared_memory.plain_memory import Plain
from meshwright.collectives.shared_memory.segment import RING, Descriptor, Place, Segment
from meshwright.collectives.shared_memory.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    MISMATCH,
    REDUCE_SCATTER,
    TYPES,
    UNREACHABLE,
    VERBS,
    Compiled,
    Steps,
    slice_begin,
)
from meshwright.collectives.shared_memory.storages import Storages
from meshwright.errors import CollectiveError, InputError

Way = Literal["compiled", "plain"]
_DYING_S = 1.0  # the memory of a process that is being killed cannot be opened a moment before it counts as dead


class SharedMemory:
    """A `Reducer` over a group of ranks on one machine; every rank of the group makes it at the same time.

    Tensors are contiguous and on the CPU. The storage of one that is not small moves into shared memory when it is
    first started: addresses taken before are stale. A tensor that was started is not touched before `finish`.

    The result is the sum in the order of the ranks, 16-bit types added in fp32 and rounded once, divided by the number
    of ranks (`operation="sum"`: not divided): the same bits on all ranks, and in every run.

    `among`: those of the group's ranks that share memory with this one, where it is not all; the group's other ranks
    make theirs at the same time. Raises `InputError` on all ranks alike where some cannot share memory. `way` asks for
    the compiled helper or for plain Python where None takes the better one; `folder` keeps what is compiled; `what` is
    what errors call a tensor.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        among: Sequence[int] | None = None,
        operation: Literal["mean", "sum"] = "mean",
        what: str = "bucket",
        timeout_s: float | None = None,
        way: Way | None = None,
        folder: Path | None = None,
    ) -> None:
        members = range(group.size()) if among is None else among
        self.ranks = [dist.get_global_rank(group, member) for member in members]
        self._rank = members.index(group.rank())
        self._mean = operation == "mean"
        self._what = what
        self._timeout_s = _timeout_s(group) if timeout_s is None else timeout_s
        self._places, self._segments, self._steps = _join(group, members, way, folder)
        self._storages = Storages(self._segments[self._rank])
        self._descriptor = Descriptor()
        self._started = self._finished = 0
        self._flying: deque[tuple[Tensor, int, int]] = deque()  # tensor, bucket, verb of what is not finished
        self._failure: CollectiveError | None = None

    def start(self, flat: Tensor, bucket: int) -> None:
        self._start(flat, bucket, ALL_REDUCE, mean=self._mean)

    def finish(self) -> None:
        self._wait(self._started)

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Tensor:
        """Leaves the sum (never the mean) of this rank's slice in its place, and returns that view; the rest of the
        tensor stays as it was. Ends with all ranks."""
        self._start(flat, bucket, REDUCE_SCATTER, mean=False)
        self._wait(self._started)
        begin, end = self.bounds(flat)
        return flat.view(-1)[begin:end]

    def all_gather(self, flat: Tensor, bucket: int) -> None:
        """Fetches every other slice from the rank that owns it. Ends with all ranks."""
        self._start(flat, bucket, ALL_GATHER, mean=False)
        self._wait(self._started)

    def bounds(self, flat: Tensor) -> tuple[int, int]:
        """From where to where this rank's slice of such a tensor goes."""
        count, item, ranks = flat.numel(), flat.element_size(), len(self.ranks)
        return slice_begin(count, item, self._rank, ranks), slice_begin(count, item, self._rank + 1, ranks)

    def close(self) -> None:
        """Closes the peers' memory. Peers that still wait for this rank are told that it has left."""
        if self._failure is None:
            self._segments[self._rank].left = self._rank + 1
            self._failure = CollectiveError("shared memory was used after it had been closed")
            self._steps.close()
        self._flying.clear()

    def _start(self, flat: Tensor, bucket: int, verb: int, *, mean: bool) -> None:
        if self._failure is not None:
            raise self._failure
        kind = TYPES.get(flat.dtype)
        if (
            flat.device.type != "cpu"
            or not flat.is_contiguous()
            or kind is None
            or (mean and kind == TYPES[torch.int64])
        ):
            raise InputError(_refusal(flat, bucket, verb))
        if len(self.ranks) == 1:
            return
        if self._started + 1 - RING > self._finished:
            self._wait(self._started + 1 - RING)
        count, described = flat.numel(), self._descriptor
        described.count, described.type, described.verb = count, kind, verb
        described.mean, described.bucket = mean, bucket
        described.staged = count == 0 or (
            verb == ALL_REDUCE and count * flat.element_size() <= self._steps.stage_up_to_bytes
        )
        if not described.staged:
            known = self._storages.place(flat.untyped_storage())
            described.slot, described.generation = known.slot, known.generation
            described.file_descriptor, described.file_bytes = known.file_descriptor, known.file_bytes
            described.offset = flat.data_ptr() - known.address
        self._started += 1
        self._flying.append((flat, bucket, verb))
        if self._steps.start(described, flat) == MISMATCH:
            self._fail(MISMATCH)

    def _wait(self, sequence: int) -> None:
        if self._failure is not None:
            raise self._failure
        if sequence <= self._finished:
            return
        since: dict[int, float] = {}
        while answer := self._steps.wait(sequence):
            now = time.monotonic()
            limit_s = _DYING_S if answer == UNREACHABLE else self._timeout_s
            if answer == MISMATCH or self._gone() or now - since.setdefault(answer, now) > limit_s:
                self._fail(answer)
            if answer == UNREACHABLE:
                time.sleep(_DYING_S / 100)
        while self._finished < sequence:
            self._flying.popleft()
            self._finished += 1

    def _gone(self) -> tuple[int, str] | None:
        """A rank that has yet to do something for the collective that we wait for, and never will."""
        blamed, awaited, _ = self._steps.why()
        behind = [rank for rank, theirs in enumerate(self._segments) if theirs.done < awaited or rank == blamed]
        late = [rank for rank in behind if rank != self._rank]
        for rank in late:
            if not segment.alive(self._places[rank]):
                return rank, "has died"
        for rank in late:
            if missing := self._segments[rank].left:
                itself = missing - 1 == rank
                return missing - 1, "has left" if itself else f"is missing, as rank {self.ranks[rank]} says"
        return None

    def _fail(self, answer: int) -> None:
        blamed, sequence, error = self._steps.why()
        _, bucket, verb = self._flying[sequence - self._finished - 1]
        what = f"shared-memory {VERBS[verb]} of {self._what} {bucket}"
        if answer == MISMATCH:
            ours, theirs = (self._segments[rank].ring[sequence % RING] for rank in (self._rank, blamed))
            words = f"brought {_described(theirs)}, rank {self.ranks[self._rank]} {_described(ours)}"
        elif gone := self._gone():
            blamed, words = gone
        elif answer == UNREACHABLE:
            words = f"has memory that cannot be opened: {os.strerror(error)}"
        else:
            words = f"did not come within {self._timeout_s:g} s"
        self._segments[self._rank].left = blamed + 1
        self._failure = CollectiveError(f"{what}: rank {self.ranks[blamed]} {words}")
        self._steps.close()
        raise self._failure


def _join(
    group: dist.ProcessGroup, members: Sequence[int], way: Way | None, folder: Path | None
) -> tuple[list[Place], list[Segment], Steps]:
    """All ranks of the group come to the same answer, since each decides by what all have said."""
    helper = fences.helper(folder)
    ways = [] if isinstance(helper, str) else ["compiled"]
    if fences.keeps_order() or ways:
        ways.append("plain")
    file, mine = segment.create()
    try:
        reason = helper if isinstance(helper, str) else ""
        everybody = _exchange(group, (segment.here(), file, ways, reason))
        said = [everybody[member] for member in members]
        places, rank = [place for place, *_ in said], members.index(group.rank())
        common = [each for each in ("compiled", "plain") if all(each in theirs for _, _, theirs, _ in said)]
        chosen = [each for each in common if way in (None, each)]
        segments, problem = [mine] * len(said), _cannot(places, chosen, [reason for *_, reason in said])
        if not problem:
            try:
                for other, (place, theirs, *_) in enumerate(said):
                    if other != rank:
                        segments[other] = segment.open_segment(place, theirs)
            except (InputError, OSError) as error:
                problem = str(error)
        if problem := next(filter(None, _exchange(group, problem)), ""):
            raise InputError(f"gradients cannot be combined in shared memory: {problem}")
    finally:
        os.close(file)
    pids = [place.pid for place in places]
    if chosen[0] == "compiled":
        assert isinstance(helper, ctypes.CDLL)
        return places, segments, Compiled(helper, rank, segments, pids)
    if fences.keeps_order() or isinstance(helper, str):
        return places, segments, Plain(rank, segments, pids)
    return places, segments, Plain(rank, segments, pids, helper.fence)


def _cannot(places: list[Place], ways: list[str], reasons: list[str]) -> str:
    """Why these ranks cannot share memory; nothing where they can."""
    if reason := segment.apart(places):
        return reason
    if ways:
        return ""
    order = "" if fences.keeps_order() else "this processor reorders writes, and "
    return f"{order}no helper was compiled: {next(filter(None, reasons), 'no rank says why')}"


def _exchange(group: dist.ProcessGroup, mine: object) -> list[Any]:
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, mine, group=group)
    return said


def _timeout_s(group: dist.ProcessGroup) -> float:
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def _refusal(flat: Tensor, bucket: int, verb: int) -> str:
    what = f"shared-memory {VERBS[verb]} of bucket {bucket}"
    if flat.device.type != "cpu":
        return f"{what}: the tensor is on {flat.device}, and only CPU tensors lie in shared memory: combine it natively"
    if not flat.is_contiguous():
        return f"{what}: the tensor of shape {tuple(flat.shape)} has strides {flat.stride()}, and must be contiguous"
    known = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
    return f"{what}: tensors of {str(flat.dtype).removeprefix('torch.')} are not averaged: {known} (int64 as a sum)"


def _described(brought: Descriptor) -> str:
    dtype = next(str(dtype).removeprefix("torch.") for dtype, number in TYPES.items() if number == brought.type)
    return f"{brought.count} elements of {dtype} for the {VERBS[brought.verb]} of bucket {brought.bucket}"

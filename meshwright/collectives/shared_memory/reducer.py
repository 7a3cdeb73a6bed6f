"""`SharedMemoryReducer`: averages the tensors of ranks on one machine in shared memory, in place and without threads.
Only small tensors are copied."""

import ctypes
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.shared_memory import compiled_helper, segment
from meshwright.collectives.shared_memory.python_steps import PythonSteps
from meshwright.collectives.shared_memory.segment import RING, Descriptor, ProcessIdentity, SharedSegment
from meshwright.collectives.shared_memory.steps import (
    ALL_GATHER,
    ALL_REDUCE,
    MISMATCH,
    REDUCE_SCATTER,
    TYPES,
    UNREACHABLE,
    VERBS,
    CollectiveSteps,
    CompiledSteps,
    slice_begin,
)
from meshwright.collectives.shared_memory.storages import SharedStorages
from meshwright.collectives.torch_private import group_timeout_s
from meshwright.errors import CollectiveError, InputError
from meshwright.messages.exchange import all_gather_values

Implementation = Literal["compiled", "python"]
_DYING_S = 1.0  # the memory of a process that is being killed becomes unreachable a moment before the process is gone


@dataclass(frozen=True)
class RankLinks:
    """The ranks of a group that is not registered with torch.distributed: their global numbers, the position of this
    one, the timeout, and a function that returns the plain values of all ranks."""

    rank: int
    ranks: Sequence[int]
    timeout_s: float
    gather: Callable[[Any], list[Any]]


class SharedMemoryReducer:
    """A `Reducer` over a group of ranks on one machine. Every rank of the group creates it at the same time.

    Tensors must be contiguous and on the CPU. The first `start` of a tensor that is not small moves the tensor's
    storage into shared memory, after which earlier addresses of its data are invalid. A started tensor must not be used
    before `finish` returns.

    The result is the sum in the order of the ranks, divided by the number of ranks (not divided with
    `operation="sum"`); 16-bit types are added in fp32 and rounded once. It has the same bits on all ranks and in every
    run.

    `among` are the ranks of the group, including this one, that share memory with each other (None: all). The other
    ranks of the group create their own reducers at the same time. If some ranks cannot share memory, all ranks raise
    `InputError`. `timeout_s` is the timeout of the group if it is None. `implementation` is chosen automatically if it
    is None. `folder` is where compiled files are stored. `what` is the word for a tensor in error messages.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | RankLinks,
        *,
        among: Sequence[int] | None = None,
        operation: Literal["mean", "sum"] = "mean",
        what: str = "bucket",
        timeout_s: float | None = None,
        implementation: Implementation | None = None,
        folder: Path | None = None,
    ) -> None:
        links = group if isinstance(group, RankLinks) else _links_of(group)
        members = range(len(links.ranks)) if among is None else among
        self.ranks = [links.ranks[member] for member in members]
        self._rank = members.index(links.rank)
        self._mean = operation == "mean"
        self._what = what
        self._timeout_s = links.timeout_s if timeout_s is None else timeout_s
        self._processes, self._segments, self._steps = _connect(links, members, implementation, folder)
        self._storages = SharedStorages(self._segments[self._rank])
        self._descriptor = Descriptor()
        self._started = self._finished = 0
        self._pending: deque[tuple[Tensor, int, int]] = deque()  # (tensor, bucket, verb) of unfinished collectives
        self._failure: CollectiveError | None = None

    def start(self, flat: Tensor, bucket: int) -> None:
        self._start(flat, bucket, ALL_REDUCE, mean=self._mean)

    @property
    def awaited(self) -> int | None:
        return next((bucket for _, bucket, _ in self._pending), None)

    def finish(self) -> None:
        self._wait(self._started)

    def reduce_scatter(self, flat: Tensor, bucket: int) -> Tensor:
        """Replaces this rank's slice of the tensor by the sum (never the mean), waits until all ranks have done so, and
        returns a view of the slice. The rest of the tensor does not change."""
        self._start(flat, bucket, REDUCE_SCATTER, mean=False)
        self._wait(self._started)
        begin, end = self.bounds(flat)
        return flat.view(-1)[begin:end]

    def all_gather(self, flat: Tensor, bucket: int) -> None:
        """Copies each slice of the tensor except this rank's own from the rank that it belongs to, and waits until all
        ranks have done so."""
        self._start(flat, bucket, ALL_GATHER, mean=False)
        self._wait(self._started)

    def bounds(self, flat: Tensor) -> tuple[int, int]:
        """Returns (begin, end) of this rank's slice of a tensor of this size and dtype."""
        count, item, ranks = flat.numel(), flat.element_size(), len(self.ranks)
        return slice_begin(count, item, self._rank, ranks), slice_begin(count, item, self._rank + 1, ranks)

    def close(self) -> None:
        """Unmaps the memory of the other ranks. Ranks that still wait for this one raise `CollectiveError`."""
        if self._failure is None:
            self._segments[self._rank].stopped_by = self._rank + 1
            self._failure = CollectiveError("shared memory was used after it had been closed")
            self._steps.close()
        self._pending.clear()

    def _start(self, flat: Tensor, bucket: int, verb: int, *, mean: bool) -> None:
        if self._failure is not None:
            raise self._failure
        type_number = TYPES.get(flat.dtype)
        if (
            flat.device.type != "cpu"
            or not flat.is_contiguous()
            or type_number is None
            or (mean and type_number == TYPES[torch.int64])
        ):
            raise InputError(_refusal(flat, bucket, verb))
        if len(self.ranks) == 1:
            return
        if self._started + 1 - RING > self._finished:
            self._wait(self._started + 1 - RING)
        count, descriptor = flat.numel(), self._descriptor
        descriptor.count, descriptor.type, descriptor.verb = count, type_number, verb
        descriptor.mean, descriptor.bucket = mean, bucket
        descriptor.staged = count == 0 or (
            verb == ALL_REDUCE and count * flat.element_size() <= self._steps.stage_up_to_bytes
        )
        if not descriptor.staged:
            shared = self._storages.share(flat.untyped_storage())
            descriptor.slot, descriptor.generation = shared.slot, shared.generation
            descriptor.file_descriptor, descriptor.file_bytes = shared.file_descriptor, shared.file_bytes
            descriptor.offset = flat.data_ptr() - shared.address
        self._started += 1
        self._pending.append((flat, bucket, verb))
        if self._steps.start(descriptor, flat) == MISMATCH:
            self._fail(MISMATCH)

    def _wait(self, sequence: int) -> None:
        if self._failure is not None:
            raise self._failure
        if sequence <= self._finished:
            return
        since: dict[int, float] = {}
        while state := self._steps.wait(sequence):
            now = time.monotonic()
            limit_s = _DYING_S if state == UNREACHABLE else self._timeout_s
            if state == MISMATCH or self._missing_rank() or now - since.setdefault(state, now) > limit_s:
                self._fail(state)
            if state == UNREACHABLE:
                time.sleep(_DYING_S / 100)
        while self._finished < sequence:
            self._pending.popleft()
            self._finished += 1

    def _missing_rank(self) -> tuple[int, str] | None:
        """Returns (rank, what happened to it) of a rank that has died or stopped, and without which the awaited
        collective cannot finish; None if there is no such rank."""
        blamed, awaited, _ = self._steps.why()
        behind = [rank for rank, theirs in enumerate(self._segments) if theirs.done < awaited or rank == blamed]
        late = [rank for rank in behind if rank != self._rank]
        for rank in late:
            if not segment.is_alive(self._processes[rank]):
                return rank, "has died"
        for rank in late:
            if stopped_by := self._segments[rank].stopped_by:
                closed = stopped_by - 1 == rank
                return stopped_by - 1, "has left" if closed else f"is missing, as rank {self.ranks[rank]} says"
        return None

    def _fail(self, state: int) -> None:
        blamed, sequence, error = self._steps.why()
        _, bucket, verb = self._pending[sequence - self._finished - 1]
        operation = f"shared-memory {VERBS[verb]} of {self._what} {bucket}"
        if state == MISMATCH:
            ours, theirs = (self._segments[rank].ring[sequence % RING] for rank in (self._rank, blamed))
            problem = f"brought {_describe(theirs)}, rank {self.ranks[self._rank]} {_describe(ours)}"
        elif missing := self._missing_rank():
            blamed, problem = missing
        elif state == UNREACHABLE:
            problem = f"has memory that cannot be opened: {os.strerror(error)}"
        else:
            problem = f"did not come within {self._timeout_s:g} s"
        self._segments[self._rank].stopped_by = blamed + 1
        self._failure = CollectiveError(f"{operation}: rank {self.ranks[blamed]} {problem}")
        self._steps.close()
        raise self._failure


@dataclass(frozen=True)
class _RankOffer:
    """What one rank tells the other ranks before they connect: its process, the file descriptor of its segment, the
    implementations that it can run, and why it has no compiled helper (empty if it has one)."""

    process: ProcessIdentity
    segment_file: int
    implementations: tuple[str, ...]
    no_helper_reason: str


def _links_of(group: dist.ProcessGroup) -> RankLinks:
    ranks = dist.get_process_group_ranks(group)
    return RankLinks(group.rank(), ranks, group_timeout_s(group), lambda value: all_gather_values(value, group))


def _connect(
    links: RankLinks, members: Sequence[int], implementation: Implementation | None, folder: Path | None
) -> tuple[list[ProcessIdentity], list[SharedSegment], CollectiveSteps]:
    """Returns the processes and the segments of the members, and the `CollectiveSteps` of this rank. Each rank decides
    by the offers of all ranks, therefore all ranks choose the same implementation, or all raise `InputError`."""
    if reason := segment.missing_on_this_system():
        raise InputError(f"gradients cannot be combined in shared memory: {reason}")
    helper = compiled_helper.load_helper(folder)
    can_run_python = compiled_helper.has_total_store_order() or not isinstance(helper, str)
    implementations = () if isinstance(helper, str) else ("compiled",)
    file, own_segment = segment.create_segment()
    try:
        offer = _RankOffer(
            process=segment.this_process(),
            segment_file=file,
            implementations=(*implementations, "python") if can_run_python else implementations,
            no_helper_reason=helper if isinstance(helper, str) else "",
        )
        all_offers = _gather_offers(links, offer)
        offers, rank = [all_offers[member] for member in members], members.index(links.rank)
        processes = [offer.process for offer in offers]
        common = [name for name in ("compiled", "python") if all(name in offer.implementations for offer in offers)]
        usable = [name for name in common if implementation in (None, name)]
        segments, problem = [own_segment] * len(offers), _why_not_shareable(offers, usable)
        if not problem:
            try:
                for peer, offer in enumerate(offers):
                    if peer != rank:
                        segments[peer] = segment.open_segment(offer.process, offer.segment_file)
            except (InputError, OSError) as error:
                problem = str(error)
        if problem := next(filter(None, links.gather(problem)), ""):
            raise InputError(f"gradients cannot be combined in shared memory: {problem}")
    finally:
        os.close(file)
    return processes, segments, _make_steps(usable[0], helper, rank, segments, [process.pid for process in processes])


def _make_steps(
    implementation: str, helper: ctypes.CDLL | str, rank: int, segments: list[SharedSegment], pids: list[int]
) -> CollectiveSteps:
    if implementation == "compiled":
        assert isinstance(helper, ctypes.CDLL)
        return CompiledSteps(helper, rank, segments, pids)
    if compiled_helper.has_total_store_order() or isinstance(helper, str):
        return PythonSteps(rank, segments, pids)
    return PythonSteps(rank, segments, pids, helper.fence)


def _why_not_shareable(offers: list[_RankOffer], usable: list[str]) -> str:
    """Returns why these ranks cannot share memory; an empty string if they can."""
    if reason := segment.why_not_shareable([offer.process for offer in offers]):
        return reason
    if usable:
        return ""
    order = "" if compiled_helper.has_total_store_order() else "this processor reorders writes, and "
    reasons = (offer.no_helper_reason for offer in offers)
    return f"{order}no helper was compiled: {next(filter(None, reasons), 'no rank says why')}"


def _gather_offers(links: RankLinks, offer: _RankOffer) -> list[_RankOffer]:
    """Returns the offers of all ranks of the group."""
    of_ranks = links.gather(asdict(offer))
    return [_RankOffer(**{**fields, "process": ProcessIdentity(**fields["process"])}) for fields in of_ranks]


def _refusal(flat: Tensor, bucket: int, verb: int) -> str:
    operation = f"shared-memory {VERBS[verb]} of bucket {bucket}"
    if flat.device.type != "cpu":
        return (
            f"{operation}: the tensor is on {flat.device}, and only CPU tensors can be in shared memory: set"
            " plan.gradients.algorithm to native"
        )
    if not flat.is_contiguous():
        return (
            f"{operation}: the tensor of shape {tuple(flat.shape)} has strides {flat.stride()}: it must be contiguous"
        )
    dtype = str(flat.dtype).removeprefix("torch.")
    supported = ", ".join(str(dtype).removeprefix("torch.") for dtype in TYPES)
    return f"{operation}: tensors of {dtype} are not averaged, only {supported} (int64 only as a sum)"


def _describe(descriptor: Descriptor) -> str:
    dtype = next(str(dtype).removeprefix("torch.") for dtype, number in TYPES.items() if number == descriptor.type)
    return f"{descriptor.count} elements of {dtype} for the {VERBS[descriptor.verb]} of bucket {descriptor.bucket}"

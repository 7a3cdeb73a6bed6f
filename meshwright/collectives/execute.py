"""Runs an all-reduce schedule on the ranks of a process group with point-to-point operations, in place. The schedule
fixes the order of additions, therefore the result has the same bits as the sequential reference in the tests."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.schedules.program import RankProgram, SegmentMessage, build_program, rank_transfers
from meshwright.collectives.schedules.schedule import Schedule

# The size of one message. Measured on two busy ARM cores (load 5), Gloo over loopback, ring and tree of 8 and 32 MiB, 2
# and 4 ranks, median of 7 runs: a message costs about 0.5 ms there, therefore segments of 256 KiB took 2 to 3 times as
# long as segments of 4 MiB, and segments of 1 MiB 1.1 to 1.5 times. Segments of 8 MiB and whole chunks were up to 1.2
# times faster than 4 MiB, but they overlap less, which costs time where links are slower than cores.
SEGMENT_BYTES = 4 * 2**20

# Number of receives that are posted before the first one is awaited, each with a buffer for one segment. With four
# ranks in a ring and 64 KiB, 2 receives took 1.6 times as long as 8, 4 took 1.25 times as long, 16 took the same time.
AHEAD = 8

# A tag is stream * _TAGS_PER_STREAM + the number of the message between its two ranks. Stream 0 is left to sends of
# other code, which have no tag.
_TAGS_PER_STREAM = 2**20
STREAMS = 2**31 // _TAGS_PER_STREAM - 1
_CACHED_PROGRAMS = 64


class UnansweredError(Exception):
    """A message to or from another rank failed. `peer` is the rank of that other rank in the group."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Execution:
    """Runs one schedule on the ranks of a group, for tensors of any size. Only one thread at a time may call `run`."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup, segment_bytes: int = SEGMENT_BYTES) -> None:
        assert schedule.ranks == group.size(), f"{schedule.name} of {schedule.ranks} ranks on {group.size()}"
        self._schedule = schedule
        self._group = group
        self._transfers = rank_transfers(schedule, group.rank())
        self._staging = torch.empty(AHEAD, segment_bytes, dtype=torch.uint8)
        self._programs: dict[tuple[int, torch.dtype], RankProgram] = {}

    def run(self, flat: Tensor, stream: int = 1) -> None:
        """Replaces the tensor, in place, by the sum over all ranks; all ranks call this. Calls that run on one group at
        the same time need different `stream` numbers, and each of them has the same number on all ranks. Raises
        `UnansweredError` if a message fails."""
        assert flat.is_contiguous(), "the flat tensor is not contiguous"
        assert (flat.dim(), flat.device.type) == (1, "cpu"), f"{flat.dim()} dimensions on {flat.device}"
        assert 0 < stream <= STREAMS, f"stream {stream} of 1 to {STREAMS}"
        _TensorExecution(self._program(flat), flat, self._staging, self._group, stream).run()

    def _program(self, flat: Tensor) -> RankProgram:
        key = (flat.numel(), flat.dtype)
        if key not in self._programs:
            if len(self._programs) == _CACHED_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            segment = self._staging.shape[1] // flat.itemsize
            self._programs[key] = build_program(self._schedule, self._transfers, flat.numel(), segment)
        return self._programs[key]


class _TensorExecution:
    """Runs a `RankProgram` once, on one tensor."""

    def __init__(
        self, program: RankProgram, flat: Tensor, staging: Tensor, group: dist.ProcessGroup, stream: int
    ) -> None:
        self._program = program
        self._flat = flat
        self._buffers = staging.view(flat.dtype).unbind()
        self._group = group
        self._tag = stream * _TAGS_PER_STREAM
        self._peer = -1  # of the operation under way, because Gloo's errors do not name the rank whose connection broke
        self._pending_sends: list[dist.Work | None] = [None] * len(program.sends)
        self._posted_receives: list[tuple[dist.Work | None, Tensor]] = []

    def run(self) -> None:
        try:
            self._run()
        except RuntimeError as error:
            raise UnansweredError(self._peer, str(error)) from error

    def _run(self) -> None:
        steps = self._program.steps
        for index in range(min(AHEAD, len(steps))):
            self._post_receive(index)
        for send in self._program.first:
            self._start_send(send)
        for index, step in enumerate(steps):
            work, received = self._posted_receives[index]
            self._wait(work, step.receive)
            for send in step.after:
                self._finish_send(send)
            if step.receive.transfer.operation == "add":
                self._slice(step.receive).add_(received)
            elif not step.receive.transfer.in_place:
                self._slice(step.receive).copy_(received)
            for send in step.then:
                self._start_send(send)
            if index + AHEAD < len(steps):
                self._post_receive(index + AHEAD)
        for send in range(len(self._pending_sends)):
            self._finish_send(send)

    def _post_receive(self, index: int) -> None:
        message = self._program.steps[index].receive
        if message.transfer.in_place:
            buffer = self._slice(message)
        else:
            buffer = self._buffers[index % AHEAD][: message.end - message.begin]
        self._peer = message.transfer.peer
        work = dist.irecv(buffer, group=self._group, group_src=self._peer, tag=self._tag + message.number)
        self._posted_receives.append((work, buffer))

    def _start_send(self, send: int) -> None:
        message = self._program.sends[send]
        self._peer = message.transfer.peer
        tag = self._tag + message.number
        self._pending_sends[send] = dist.isend(self._slice(message), group=self._group, group_dst=self._peer, tag=tag)

    def _finish_send(self, send: int) -> None:
        """Waits until the send has finished, unless that was waited for before: a second wait on a Gloo send never
        returns."""
        if (work := self._pending_sends[send]) is not None:
            self._wait(work, self._program.sends[send])
            self._pending_sends[send] = None

    def _wait(self, work: dist.Work | None, message: SegmentMessage) -> None:
        assert work is not None
        self._peer = message.transfer.peer
        work.wait()

    def _slice(self, message: SegmentMessage) -> Tensor:
        return self._flat[message.begin : message.end]

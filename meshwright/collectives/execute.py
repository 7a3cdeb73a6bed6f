"""Runs a schedule on the ranks of a group, with point-to-point operations: in place, bitwise as `rehearse` would."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.schedules.program import Message, Program, program, transfers
from meshwright.collectives.schedules.schedule import Schedule

# Measured on two busy ARM cores (load 5), Gloo over loopback, ring and tree of 8 and 32 MiB, 2 and 4 ranks, median of 7
# rounds: a message costs about 0.5 ms there, so 256 KiB took 2 to 3 times as long as 4 MiB, 1 MiB 1.1 to 1.5 times.
# 8 MiB and whole chunks were up to 1.2 times faster still, but leave less to overlap where links are the slower part.
SEGMENT_BYTES = 4 * 2**20

# Receives that are posted before they are awaited, each with room for a segment. Four ranks in a ring, 64 KiB: 2 took
# 1.6 times as long as 8, 4 took 1.25 times, 16 the same.
AHEAD = 8

# Tags: a stream's messages from one rank to another are numbered. Stream 0 is left to whoever sends without a tag.
_MESSAGES = 2**20
STREAMS = 2**31 // _MESSAGES - 1
_PROGRAMS = 64  # sizes that are remembered


class UnansweredError(Exception):
    """A rank did not take or send what it should have. `peer` is its rank in the group."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer


class Execution:
    """A schedule on the ranks of a group. One thread at a time may run it."""

    def __init__(self, schedule: Schedule, group: dist.ProcessGroup, segment_bytes: int = SEGMENT_BYTES) -> None:
        assert schedule.ranks == group.size(), f"{schedule.name} of {schedule.ranks} ranks on {group.size()}"
        self._schedule = schedule
        self._group = group
        self._transfers = transfers(schedule, group.rank())
        self._staging = torch.empty(AHEAD, segment_bytes, dtype=torch.uint8)
        self._programs: dict[tuple[int, torch.dtype], Program] = {}

    def run(self, flat: Tensor, stream: int = 1) -> None:
        """Leaves in every rank's tensor what the schedule makes of them: the sum. Executions that run on one group at
        the same time need different streams, which all ranks call by the same number."""
        assert flat.is_contiguous(), "a flat tensor has no gaps"
        assert (flat.dim(), flat.device.type) == (1, "cpu"), f"{flat.dim()} dimensions on {flat.device}"
        assert 0 < stream <= STREAMS, f"stream {stream} of 1 to {STREAMS}"
        _Run(self._program(flat), flat, self._staging, self._group, stream).run()

    def _program(self, flat: Tensor) -> Program:
        key = (flat.numel(), flat.dtype)
        if key not in self._programs:
            if len(self._programs) == _PROGRAMS:
                del self._programs[next(iter(self._programs))]
            segment = self._staging.shape[1] // flat.itemsize
            self._programs[key] = program(self._schedule, self._transfers, flat.numel(), segment)
        return self._programs[key]


class _Run:
    """One tensor on its way."""

    def __init__(self, steps: Program, flat: Tensor, staging: Tensor, group: dist.ProcessGroup, stream: int) -> None:
        self._program = steps
        self._flat = flat
        self._rooms = staging.view(flat.dtype).unbind()
        self._group = group
        self._tag = stream * _MESSAGES
        self._peer = -1  # whom the operation under way is with: Gloo's errors do not tell whose connection broke
        self._sent: list[dist.Work | None] = [None] * len(steps.sends)
        self._posted: list[tuple[dist.Work | None, Tensor]] = []

    def run(self) -> None:
        try:
            self._run()
        except RuntimeError as error:
            raise UnansweredError(self._peer, str(error)) from error

    def _run(self) -> None:
        steps = self._program.steps
        for place in range(min(AHEAD, len(steps))):
            self._post(place)
        for number in self._program.first:
            self._send(number)
        for place, step in enumerate(steps):
            work, arrived = self._posted[place]
            self._wait(work, step.receive)
            for number in step.after:
                self._let_go(number)
            if step.receive.transfer.operation == "add":
                self._part(step.receive).add_(arrived)
            elif not step.receive.transfer.in_place:
                self._part(step.receive).copy_(arrived)
            for number in step.then:
                self._send(number)
            if place + AHEAD < len(steps):
                self._post(place + AHEAD)
        for number in range(len(self._sent)):
            self._let_go(number)

    def _post(self, place: int) -> None:
        message = self._program.steps[place].receive
        if message.transfer.in_place:
            room = self._part(message)
        else:
            room = self._rooms[place % AHEAD][: message.end - message.begin]
        self._peer = message.transfer.peer
        work = dist.irecv(room, group=self._group, group_src=self._peer, tag=self._tag + message.number)
        self._posted.append((work, room))

    def _send(self, number: int) -> None:
        message = self._program.sends[number]
        self._peer = message.transfer.peer
        tag = self._tag + message.number
        self._sent[number] = dist.isend(self._part(message), group=self._group, group_dst=self._peer, tag=tag)

    def _let_go(self, number: int) -> None:
        """Until a send has left. Whoever waits for one of Gloo a second time waits forever."""
        if (work := self._sent[number]) is not None:
            self._wait(work, self._program.sends[number])
            self._sent[number] = None

    def _wait(self, work: dist.Work | None, message: Message) -> None:
        assert work is not None
        self._peer = message.transfer.peer
        work.wait()

    def _part(self, message: Message) -> Tensor:
        return self._flat[message.begin : message.end]

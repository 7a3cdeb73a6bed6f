"""Seconds of CPU ranks that execute a schedule message by message, as collectives/execute.py does.

    host      = message_s / 2 for a send and for a receive, + b / add if the message is added, + b / copy if it was
                copied and not received in place, + b byte_s / 2 on each side for the transport: all on the node's cores
                                                            _compute_and_send, _run_on_core
    link      : a message starts once its sender has learned (after the latency) that it can be received; the link is
                busy for b / together from when it is free, or up to `credit` earlier if it was idle; no message arrives
                sooner than b / bandwidth - credit + latency after its start                     _transmit
    program   = every rank runs its steps in their order, each as soon as possible               run

b is the number of bytes of a message. Chunks that a rank sends to the same rank in one round are sent together and cut
into segments, see collectives/schedules/program.py.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import heappop, heappush
from itertools import count as count_from
from math import inf

from meshwright.collectives.execute import AHEAD
from meshwright.collectives.schedules.program import (
    RankProgram,
    ReceiveStep,
    SegmentMessage,
    Transfer,
    build_program,
    rank_transfers,
)
from meshwright.collectives.schedules.schedule import Schedule
from meshwright.simulator.communication.cpu_network import CpuNetwork, LinkTier

_MessageKey = tuple[int, int, int]  # source, target, and the number of a message among theirs


@dataclass(frozen=True)
class ScheduleExecution:
    """How a schedule is executed: `segment_bytes` is the size of a segment, `message_s` the seconds of a core to send
    and receive a message, and `latency_factor` the latency of a message divided by that of the link."""

    segment_bytes: int
    message_s: float
    latency_factor: float = 1.0


def replay_schedule_s(
    schedule: Schedule,
    size_bytes: int,
    execution: ScheduleExecution,
    network: CpuNetwork,
    node_of: Sequence[int],
) -> float:
    """Seconds until the last rank has finished the schedule. `node_of` has the number of each rank's node."""
    programs = [
        build_program(schedule, transfers, size_bytes, execution.segment_bytes) for transfers in _transfers(schedule)
    ]
    return _ScheduleReplay(programs, execution, network, node_of).run()


@lru_cache(maxsize=64)
def _transfers(schedule: Schedule) -> list[tuple[list[Transfer], list[Transfer]]]:
    return [rank_transfers(schedule, rank) for rank in range(schedule.ranks)]


class _ScheduleReplay:
    """A discrete-event simulation of ranks that execute their programs. Events are handled in the order of their
    time, so that cores and links serve whoever comes first."""

    def __init__(
        self,
        programs: Sequence[RankProgram],
        execution: ScheduleExecution,
        network: CpuNetwork,
        node_of: Sequence[int],
    ) -> None:
        self._programs, self._execution, self._network, self._node_of = programs, execution, network, node_of
        self._rank_free = [0.0] * len(programs)  # when a rank has finished its latest step
        self._next_step = [0] * len(programs)
        self._receive_posted: dict[_MessageKey, float] = {}  # when the sender learns that a message can be received
        # Time and bytes of messages that were sent and cannot be received yet.
        self._unposted_sends: dict[_MessageKey, tuple[float, int]] = {}
        self._arrived: dict[_MessageKey, float] = {}
        self._waiting: dict[_MessageKey, int] = {}
        self._link_free: defaultdict[tuple[int, int], float] = defaultdict(lambda: -inf)  # idle since long before
        count = max(1, round(network.host.cores))
        self._core_free = {node: [0.0] * count for node in set(node_of)}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._event_numbers = count_from(0)

    def run(self) -> float:
        """Seconds until the last rank has finished."""
        for rank, program in enumerate(self._programs):
            for place in range(min(AHEAD, len(program.steps))):
                self._post_receive(rank, place)
        for rank, program in enumerate(self._programs):
            self._compute_and_send(rank, 0.0, 0.0, program.first)
            self._schedule_event(0.0, partial(self._try_next_step, rank))
        while self._events:
            heappop(self._events)[2]()
        assert not self._waiting, "a schedule that waits for itself"
        return max(self._rank_free)

    def _schedule_event(self, time_s: float, event: Callable[[], None]) -> None:
        heappush(self._events, (time_s, next(self._event_numbers), event))

    def _try_next_step(self, rank: int) -> None:
        """Schedules the rank's next step if the message that it receives has arrived; else the rank waits for it."""
        program, place = self._programs[rank], self._next_step[rank]
        if place == len(program.steps):
            return
        step = program.steps[place]
        key = (step.receive.transfer.peer, rank, step.receive.number)
        if key not in self._arrived:
            self._waiting[key] = rank
            return
        begin = max(self._rank_free[rank], self._arrived[key])
        self._schedule_event(begin, partial(self._finish_receive, rank, key, step))

    def _finish_receive(self, rank: int, key: _MessageKey, step: ReceiveStep) -> None:
        begin = max(self._rank_free[rank], self._arrived.pop(key))
        self._compute_and_send(rank, begin, self._execution.message_s / 2 + self._store_s(step.receive), step.then)
        place = self._next_step[rank]
        self._next_step[rank] += 1
        if place + AHEAD < len(self._programs[rank].steps):
            self._post_receive(rank, place + AHEAD)
        self._try_next_step(rank)

    def _store_s(self, message: SegmentMessage) -> float:
        """Seconds of a core to add a received message to the tensor, or to copy it there; 0 if it was received in
        place."""
        size = message.end - message.begin
        if message.transfer.operation == "add":
            return size / self._network.host.add_bytes_per_s
        return 0.0 if message.transfer.in_place else size / self._network.host.copy_bytes_per_s

    def _compute_and_send(self, rank: int, begin: float, seconds: float, sends: Sequence[int]) -> None:
        """Occupies a core of the rank's node for `seconds`, and then sends the messages with the numbers `sends`."""
        send_s = self._execution.message_s / 2
        end = self._run_on_core(self._node_of[rank], begin, seconds + len(sends) * send_s)
        self._rank_free[rank] = end
        for place, number in enumerate(sends):
            message = self._programs[rank].sends[number]
            sent, size = end - (len(sends) - 1 - place) * send_s, message.end - message.begin
            key = (rank, message.transfer.peer, message.number)
            if key in self._receive_posted:
                self._start_message(key, sent, size)
            else:
                self._unposted_sends[key] = (sent, size)

    def _run_on_core(self, node: int, begin: float, seconds: float) -> float:
        """Occupies the core of the node that is free first, from `begin` at the earliest. Returns the time when it
        ends."""
        if not seconds:
            return begin
        cores = self._core_free[node]
        end = max(begin, heappop(cores)) + seconds
        heappush(cores, end)
        return end

    def _post_receive(self, rank: int, place: int) -> None:
        message = self._programs[rank].steps[place].receive
        key = (message.transfer.peer, rank, message.number)
        self._receive_posted[key] = self._rank_free[rank] + self._latency_s(*key[:2])
        if key in self._unposted_sends:
            self._start_message(key, *self._unposted_sends.pop(key))

    def _start_message(self, key: _MessageKey, sent: float, size: int) -> None:
        start = max(sent, self._receive_posted.pop(key))
        self._schedule_event(start, partial(self._transmit, key, start, size))

    def _transmit(self, key: _MessageKey, start: float, size: int) -> None:
        """Sends a message over its link and records when it arrives: after the link has transmitted it, cores on both
        sides have copied it, and the latency has passed."""
        source, target, _ = key
        link, tier = (self._node_of[source], self._node_of[target]), self._tier(source, target)
        begin = max(start - tier.credit_s, self._link_free[link])
        self._link_free[link] = begin + size / tier.together_bytes_per_s
        copied = [self._run_on_core(node, start, size * self._network.host.byte_s / 2) for node in link]
        alone = start + max(0.0, size / tier.bandwidth_bytes_per_s - tier.credit_s)
        transmitted = max(self._link_free[link], alone, *copied)
        self._arrived[key] = transmitted + self._latency_s(source, target)
        if (rank := self._waiting.pop(key, None)) is not None:
            self._try_next_step(rank)

    def _latency_s(self, source: int, target: int) -> float:
        return self._tier(source, target).latency_s * self._execution.latency_factor

    def _tier(self, source: int, target: int) -> LinkTier:
        if self._node_of[source] == self._node_of[target]:
            return self._network.within
        assert self._network.across is not None, "nodes without a link between them"
        return self._network.across

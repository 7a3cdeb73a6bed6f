"""`ServerRounds`: lets all servers make the same updates, each to its own rows. In every round the coordinator
broadcasts a `RoundOrder`. All servers wait for the reports of the workers that it names, agree on which of these are
still connected, apply their gradients, and reply to them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.errors import CollectiveError
from meshwright.processes.peer_connection import PeerTimeoutError
from meshwright.train.servers.connections import Connection, Connections
from meshwright.train.servers.messages import Instruction, ServerReply
from meshwright.train.servers.parameter_shard import ParameterShard, UpdateResult
from meshwright.train.servers.server_group import ServerGroup

_UPDATE, _REPLY = 1, 2  # a worker's number in a packed order: _UPDATE if in `updates`, plus instruction times _REPLY


@dataclass(frozen=True)
class RoundOrder:
    """What all servers do in one round. `updates`: the workers whose gradients make one update. `replies`: the
    instruction for each worker that gets a reply after the update. `incarnations`: the incarnation of each worker in
    these two. `dropped`: by worker, incarnations that are gone. `end`: this order ends the rounds of a step."""

    incarnations: Mapping[int, int] = field(default_factory=dict)
    updates: Sequence[int] = ()
    replies: Mapping[int, Instruction] = field(default_factory=dict)
    dropped: Mapping[int, int] = field(default_factory=dict)
    end: bool = False


class ServerRounds:
    """Carries out rounds on one server. The coordinator calls `begin`, `update` and `answer` for each round, and `end`
    after the last; the other servers call `follow`. `one_worker_per_update` is True for asynchronous updates."""

    def __init__(
        self,
        group: ServerGroup,
        connections: Connections,
        shard: ParameterShard,
        workers: int,
        timeout_s: float,
        one_worker_per_update: bool = False,
    ) -> None:
        self._group = group
        self._connections = connections
        self._shard = shard
        self._workers = workers
        self._one_worker_per_update = one_worker_per_update
        self._timeout_s = timeout_s

    # ---- called by the coordinator

    def begin(self, order: RoundOrder) -> set[int]:
        """Broadcasts an order. Returns the workers in it that are gone for any server."""
        self._group.broadcast(self._pack(order))
        return self._agree_on_missing(order)

    def update(self, workers: Sequence[int]) -> UpdateResult:
        """Updates this server's parameters with the gradients of these workers."""
        pushes = []
        for worker in workers:
            connection = self._connections.by_worker[worker]
            assert connection.pushed is not None
            pushes.append((connection.pushed, connection.push))
        return self._shard.update(pushes, workers[0] if self._one_worker_per_update else None)

    def answer(self, replies: Mapping[int, ServerReply]) -> None:
        for worker, reply in replies.items():
            self._connections.send_reply(worker, reply)

    def end(self, value: Any) -> Any:
        """Ends the rounds of a step. `follow` returns `value` on the other servers. Returns `value`."""
        self._group.broadcast(self._pack(RoundOrder(end=True)))
        return self._group.broadcast_value(value)

    # ---- called by the other servers

    def follow(self) -> Any:
        """Carries out the coordinator's orders until it calls `end`. Returns the value that it passes to `end`."""
        while True:
            order = self._unpack(self._group.broadcast(torch.zeros(3 * self._workers + 1, dtype=torch.int64)))
            if order.end:
                return self._group.broadcast_value(None)
            missing = self._agree_on_missing(order)
            updates = [worker for worker in order.updates if worker not in missing]
            if updates:
                self.update(updates)
            replies = {worker: ServerReply(instruction=i) for worker, i in order.replies.items()}
            self.answer({worker: reply for worker, reply in replies.items() if worker not in missing})

    # ---- on all servers

    def _agree_on_missing(self, order: RoundOrder) -> set[int]:
        """Drops the workers of an order whose connection any server has lost, and returns them."""
        for worker, incarnation in order.dropped.items():
            self._connections.drop(worker, incarnation)
        connected = torch.ones(self._workers, dtype=torch.int64)
        for worker, incarnation in order.incarnations.items():
            connected[worker] = self._wait_for_report(worker, incarnation)
        self._group.minimum(connected)
        missing = {worker for worker in order.incarnations if not connected[worker]}
        for worker in missing:
            self._connections.drop(worker, order.incarnations[worker])
        for worker in {*missing, *order.dropped}:
            self._shard.forget(worker)
        return missing

    def _wait_for_report(self, worker: int, incarnation: int) -> bool:
        """Waits until the worker's report has arrived at this server. Returns False if this incarnation of it is
        gone."""

        def is_settled() -> bool:
            connection = self._connections.by_worker.get(worker)
            if connection is None:
                return False
            is_done = connection.incarnation == incarnation and (connection.idle or bool(connection.error))
            return connection.incarnation > incarnation or is_done

        if not self._connections.wait(is_settled, self._timeout_s):
            raise CollectiveError(
                f"server {self._group.rank}: no message within {self._timeout_s:g} s from worker {worker}"
            )
        connection = self._connections.by_worker[worker]
        raise_if_timed_out(connection)
        return connection.incarnation == incarnation and connection.error is None

    def _pack(self, order: RoundOrder) -> torch.Tensor:
        numbers = torch.zeros(3 * self._workers + 1, dtype=torch.int64)
        for worker in range(self._workers):
            numbers[3 * worker] = order.incarnations.get(worker, 0)
            numbers[3 * worker + 1] = _UPDATE * (worker in order.updates) + _REPLY * order.replies.get(worker, 0)
            numbers[3 * worker + 2] = order.dropped.get(worker, 0)
        numbers[-1] = order.end
        return numbers

    def _unpack(self, numbers: torch.Tensor) -> RoundOrder:
        rows = numbers[:-1].view(-1, 3).tolist()
        return RoundOrder(
            incarnations={worker: incarnation for worker, (incarnation, _, _) in enumerate(rows) if incarnation},
            updates=[worker for worker, (_, actions, _) in enumerate(rows) if actions & _UPDATE],
            replies={
                worker: Instruction(actions // _REPLY)
                for worker, (_, actions, _) in enumerate(rows)
                if actions >= _REPLY
            },
            dropped={worker: incarnation for worker, (_, _, incarnation) in enumerate(rows) if incarnation},
            end=bool(numbers[-1]),
        )


def raise_if_timed_out(connection: Connection) -> None:
    """Raises a `CollectiveError` if a worker did not answer in time. It may hang, so all ranks have to be restarted.
    For a worker that is gone it raises nothing: the caller drops the worker, and the run continues."""
    if isinstance(connection.error, PeerTimeoutError):
        raise CollectiveError(str(connection.error)) from connection.error

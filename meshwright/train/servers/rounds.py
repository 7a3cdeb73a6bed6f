"""What servers do together, so that each holds its part of the same weights: the first one gives an `Order`, all wait
until the workers that it names are there, agree on which of them are, and apply and answer the same ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.errors import CollectiveError
from meshwright.launch.pairs import Late
from meshwright.train.servers.connections import Desk, Seat
from meshwright.train.servers.messages import Do, Reply
from meshwright.train.servers.parameter_shard import Holding, Outcome
from meshwright.train.servers.team import Team

_UPDATE, _REPLY = 1, 2  # behind the latter, what to do


@dataclass(frozen=True)
class Order:
    """`lives`: the lives of the workers that it is about. `updates`: whose gradients make one update; `replies`: who is
    answered after it; `dropped`: lives that are over. `end`: there is no more to do in this step."""

    lives: Mapping[int, int] = field(default_factory=dict)
    updates: Sequence[int] = ()
    replies: Mapping[int, Do] = field(default_factory=dict)
    dropped: Mapping[int, int] = field(default_factory=dict)
    end: bool = False


class Rounds:
    def __init__(
        self, team: Team, desk: Desk, holding: Holding, workers: int, timeout_s: float, singly: bool = False
    ) -> None:
        """`singly`: each update is of one worker's gradients."""
        self._team = team
        self._desk = desk
        self._holding = holding
        self._workers = workers
        self._singly = singly
        self._timeout_s = timeout_s

    # ---- the first server

    def begin(self, order: Order) -> set[int]:
        """Gives the order; returns those that it is about who are not there any more, on any server."""
        self._team.from_first(self._packed(order))
        return self._gone(order)

    def update(self, workers: Sequence[int]) -> Outcome:
        pushed = []
        for worker in workers:
            seat = self._desk.seats[worker]
            assert seat.pushed is not None
            pushed.append((seat.pushed, seat.push))
        return self._holding.update(pushed, workers[0] if self._singly else None)

    def answer(self, replies: Mapping[int, Reply]) -> None:
        for worker, reply in replies.items():
            self._desk.hand(worker, reply)

    def end(self, value: Any) -> Any:
        """Lets the others return from `follow`, with this value."""
        self._team.from_first(self._packed(Order(end=True)))
        return self._team.told(value)

    # ---- the others

    def follow(self) -> Any:
        """Does what the first server orders until it ends; returns what it says then."""
        while True:
            order = self._unpacked(self._team.from_first(torch.zeros(3 * self._workers + 1, dtype=torch.int64)))
            if order.end:
                return self._team.told(None)
            gone = self._gone(order)
            updates = [worker for worker in order.updates if worker not in gone]
            if updates:
                self.update(updates)
            self.answer({worker: Reply(do=do) for worker, do in order.replies.items() if worker not in gone})

    # ---- all

    def _gone(self, order: Order) -> set[int]:
        for worker, life in order.dropped.items():
            self._desk.drop(worker, life)
        there = torch.ones(self._workers, dtype=torch.int64)
        for worker, life in order.lives.items():
            there[worker] = self._is_there(worker, life)
        self._team.least(there)
        gone = {worker for worker in order.lives if not there[worker]}
        for worker in gone:
            self._desk.drop(worker, order.lives[worker])
        for worker in {*gone, *order.dropped}:
            self._holding.forget(worker)
        return gone

    def _is_there(self, worker: int, life: int) -> bool:
        """Whether that life of it has said what it had to say, also to this server."""

        def settled() -> bool:
            seat = self._desk.seats.get(worker)
            return seat is not None and (seat.life > life or (seat.life == life and (seat.idle or bool(seat.error))))

        if not self._desk.wait(settled, self._timeout_s):
            raise CollectiveError(f"server {self._team.rank} waited {self._timeout_s:g} s in vain for worker {worker}")
        seat = self._desk.seats[worker]
        raise_if_late(seat)
        return seat.life == life and seat.error is None

    def _packed(self, order: Order) -> torch.Tensor:
        numbers = torch.zeros(3 * self._workers + 1, dtype=torch.int64)
        for worker in range(self._workers):
            numbers[3 * worker] = order.lives.get(worker, 0)
            numbers[3 * worker + 1] = _UPDATE * (worker in order.updates) + _REPLY * order.replies.get(worker, 0)
            numbers[3 * worker + 2] = order.dropped.get(worker, 0)
        numbers[-1] = order.end
        return numbers

    def _unpacked(self, numbers: torch.Tensor) -> Order:
        rows = numbers[:-1].view(-1, 3).tolist()
        return Order(
            lives={worker: life for worker, (life, _, _) in enumerate(rows) if life},
            updates=[worker for worker, (_, does, _) in enumerate(rows) if does & _UPDATE],
            replies={worker: Do(does // _REPLY) for worker, (_, does, _) in enumerate(rows) if does >= _REPLY},
            dropped={worker: life for worker, (_, _, life) in enumerate(rows) if life},
            end=bool(numbers[-1]),
        )


def raise_if_late(seat: Seat) -> None:
    """Who is gone is dropped; who does not answer hangs, and takes the attempt with it."""
    if isinstance(seat.error, Late):
        raise CollectiveError(str(seat.error)) from seat.error

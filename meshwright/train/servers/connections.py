"""Where a server meets its workers: one thread for each, which sends what it is handed and receives the answer. The
server's own thread looks at the seats, and holds everything that is computed with."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.launch.pairs import Connect, Pair
from meshwright.train.servers.messages import Do, Frame, Reply, Said, Told
from meshwright.train.servers.parameter_shard import Holding

LOOK_S = 0.02  # how often it is looked whether a worker has come (back)


@dataclass
class Seat:
    """A worker in its `life`-th life: `idle` while it waits for a reply; `told` is the last thing that it said, with
    what an evaluation found, and `pushed` goes with the gradients in its frame. `error`: it is gone, or late; `left`:
    it was told to stop."""

    worker: int
    life: int
    push: Frame
    reply: Frame
    idle: bool = True
    told: Told | None = None
    pushed: Told | None = None
    findings: bytes = b""
    error: CollectiveError | None = None
    left: bool = False
    heard: int = 0  # the number of its last word among all workers'
    since_s: float = field(default_factory=time.monotonic)  # when it began to wait
    _handed: bool = False
    _ends: bool = False


class Desk:
    def __init__(
        self, server: int, workers: int, holding: Holding, connect: Connect, timeout_s: float, first_rank: int = 0
    ) -> None:
        """`first_rank`: that of worker 0, for errors that name a worker."""
        self._server = server
        self._holding = holding
        self._connect = connect
        self._timeout_s = timeout_s
        self._first_rank = first_rank
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._news = 0
        self._words = 0
        self.seats: dict[int, Seat] = {}
        for worker in range(workers):
            threading.Thread(target=self._attend, args=(worker,), daemon=True, name=f"worker {worker}").start()

    # ---- for the server's own thread

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Waits until that is so, in slices short enough for signals to be noticed; whether it came to be."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until():
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, 0.2))
            return True

    def wait_for_news(self, since: int, seconds: float) -> int:
        """`since`: what the last call returned."""
        self.wait(lambda: self._news != since, seconds)
        return self._news

    @property
    def news(self) -> int:
        return self._news

    def hand(self, worker: int, reply: Reply) -> None:
        """Sends the weights as they are now."""
        seat = self.seats[worker]
        assert seat.idle, f"worker {worker} has not answered the last reply"
        if not seat.heard:
            self._holding.fill_fixed()
        self._holding.fill_reply(seat.reply, reply)
        with self._changed:
            seat.idle, seat._handed, seat._ends = False, True, reply.do == Do.STOP
            self._changed.notify_all()

    def drop(self, worker: int, life: int) -> None:
        """That life of it is over; its thread waits for the next."""
        with self._changed:
            seat = self.seats.get(worker)
            if seat is None or seat.life > life:
                return
            del self.seats[worker]
            seat.error = seat.error or CollectiveError(f"worker {worker} was dropped")
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Waits until everybody who was told to stop has got the message."""
        self.wait(lambda: all(seat.left or seat.error for seat in self.seats.values() if seat._ends), seconds)
        self._closed.set()  # nobody waits any more for those that did not come back

    # ---- a worker's thread

    def _attend(self, worker: int) -> None:
        known = 0
        store = self._connect()
        while (life := self._next_life(store, worker, known)) is not None:
            known = life
            name = f"worker {worker} (rank {self._first_rank + worker})"
            try:
                pair = Pair(pair_store(store, self._server, worker, known), True, name, self._timeout_s)
            except CollectiveError:
                continue  # it died before it came
            seat = Seat(worker, known, self._holding.push_frame(worker), self._holding.reply_frame())
            with self._changed:
                self.seats[worker] = seat
                self._tell()
            try:
                self._talk(seat, pair)
                return
            except Exception as error:
                with self._changed:
                    seat.error = error if isinstance(error, CollectiveError) else CollectiveError(repr(error))
                    self._tell()

    def _talk(self, seat: Seat, pair: Pair) -> None:
        header = torch.empty(Told.size(), dtype=torch.uint8)
        first = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: seat._handed or seat.error is not None)
                if seat.error is not None:
                    raise seat.error
                seat._handed = False
            if first and self._holding.fixed:
                pair.send(self._holding.fixed.memory)
            first = False
            pair.send(seat.reply.memory)
            if seat._ends:
                with self._changed:
                    seat.left = True
                    self._tell()
                return
            pair.receive(header)
            told, findings = Told.unpack(header), b""
            if told.said == Said.GRADIENTS:
                pair.receive(seat.push.memory)
            elif told.bytes:
                data = torch.empty(told.bytes, dtype=torch.uint8)
                pair.receive(data)
                findings = data.numpy().tobytes()
            with self._changed:
                self._words += 1
                seat.pushed = told if told.said == Said.GRADIENTS else seat.pushed
                seat.told, seat.findings, seat.heard = told, findings, self._words
                seat.idle, seat.since_s = True, time.monotonic()
                self._tell()

    def _next_life(self, store: dist.Store, worker: int, known: int) -> int | None:
        """Waits for the worker to come, or to come back; None where nobody shall come any more."""
        while not self._closed.wait(LOOK_S):
            with suppress(RuntimeError):  # the store may be gone already when all is over
                life = int(store.add(f"life/{worker}", 0))
                if life > known:
                    return life
        return None

    def _tell(self) -> None:
        self._news += 1
        self._changed.notify_all()


def announce(store: dist.Store, worker: int) -> int:
    """A worker says that it is there; returns which life of it this is."""
    return int(store.add(f"life/{worker}", 1))


def pair_store(store: dist.Store, server: int, worker: int, life: int) -> dist.Store:
    return dist.PrefixStore(f"pair/{server}-{worker}-{life}", store)

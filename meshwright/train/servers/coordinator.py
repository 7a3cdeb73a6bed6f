"""The first server's decisions: whose gradients are applied when, who is answered, and who evaluates what."""

import pickle
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from meshwright.errors import CollectiveError
from meshwright.train.servers.clocks import Clocks
from meshwright.train.servers.connections import Desk, Seat
from meshwright.train.servers.messages import Do, Reply, Said, Told
from meshwright.train.servers.parameter_shard import Outcome
from meshwright.train.servers.rounds import Order, Rounds, raise_if_late

Updates = Literal["synchronous", "asynchronous", "bounded"]
Position = tuple[int, int]
Totals = dict[str, Tensor]


@dataclass
class Staleness:
    """How many updates came between the weights that gradients were computed on and their own update."""

    pushes: int = 0
    total: int = 0
    largest: int = 0

    def add(self, updates_between: int) -> None:
        self.pushes += 1
        self.total += updates_between
        self.largest = max(self.largest, updates_between)

    @property
    def mean(self) -> float:
        return self.total / self.pushes if self.pushes else 0.0


@dataclass
class Progress:
    """What was applied since the last step of the run ended."""

    samples: int = 0
    loss: float = 0.0
    count: float = 0.0
    updates: int = 0
    stepped: bool = False

    def add(self, told: Told) -> None:
        self.samples += told.samples
        self.loss += told.loss
        self.count += told.count


@dataclass
class Lead:
    """Holds who is there, what they have said, and what the run has come to."""

    rounds: Rounds
    desk: Desk
    clocks: Clocks
    workers: int
    updates: Updates
    timeout_s: float
    seed: int
    say: Callable[[str], None] = lambda line: None
    seen: Callable[[int], str] = lambda worker: ""  # where a worker was last seen, for errors
    divided: int = 0  # into how many parts the data set is, by sample
    version: int = 0
    rejoined: int = 0
    peak_bytes: int = 0
    loss_scale: tuple[float, int, int] = (0.0, 0, 0)
    staleness: Staleness = field(default_factory=Staleness)
    progress: Progress = field(default_factory=Progress)
    positions: dict[int, Position] = field(default_factory=dict)  # which batch comes behind so many
    starts: dict[int, int] = field(default_factory=dict)  # where workers that come for the first time begin
    _admitted: dict[int, int] = field(default_factory=dict)  # workers that take part, in which life
    _pending: dict[int, Told] = field(default_factory=dict)  # gradients that wait to be applied
    _outcomes: dict[int, Outcome] = field(default_factory=dict)  # what became of the last ones
    _heard: dict[int, int] = field(default_factory=dict)  # up to which word each was listened to
    _evaluated: dict[int, Any] = field(default_factory=dict)
    _alone_since_s: float = 0.0

    # ---- a step of the run

    def step(self, steps: int) -> Progress:
        """Applies what workers push until the run is one step further than `steps`."""
        self._gather()
        self.progress = Progress() if self.clocks.step <= steps else self.progress
        while self.clocks.step <= steps and not self.clocks.over:
            news = self.desk.news
            if not self._round():
                self._rest(news)
        known = min([min(self.clocks.step, steps + 1), *self.clocks.alive.values()])
        self.positions = {clock: at for clock, at in self.positions.items() if clock >= known} or self.positions
        return self.progress

    def position_at(self, clock: int) -> Position:
        """The batch that comes behind so many."""
        return self.positions[max((known for known in self.positions if known <= clock), default=min(self.positions))]

    def _round(self) -> bool:
        """One order, where there is anything to do."""
        dropped = self._listen()
        joining = self._joining()
        updates = self._due()
        after = {worker: clock + (worker in updates) for worker, clock in self.clocks.alive.items()}
        replies = {worker: Do.STEP for worker in self._idle(updates) if self._goes_on(worker, after)}
        replies |= self._signs_of_life(set(replies) | set(updates))
        if not (dropped or joining or updates or replies):
            return False
        self._carry_out(updates, replies, dropped)
        return True

    def _carry_out(
        self, updates: Sequence[int], replies: dict[int, Do], dropped: dict[int, int], parts: Any = None
    ) -> None:
        about = {*updates, *replies}
        lives = {worker: self._admitted[worker] for worker in sorted(about)}
        gone = self.rounds.begin(Order(lives, updates, replies, dropped))
        for worker in gone:
            self._lose(worker)
        applied = [worker for worker in updates if worker not in gone]
        if applied:
            self._apply(applied)
        told = {}
        for worker, do in sorted(replies.items()):
            if worker not in gone:
                if do == Do.STEP:
                    self.clocks.go_on(worker)
                told[worker] = self._reply(worker, do, parts)
        self.rounds.answer(told)

    def _apply(self, workers: Sequence[int]) -> None:
        outcome = self.rounds.update(workers)
        for worker in workers:
            told = self._pending.pop(worker)
            self._outcomes[worker] = outcome
            if outcome.stepped:
                self.staleness.add(self.version - told.version)
            self.clocks.advance(worker)
            clock = self.clocks.alive[worker]
            self.positions[clock] = (told.epoch + 1, 0) if told.last else (told.epoch, told.index + 1)
            self.progress.add(told)
        self.version += outcome.stepped
        self.progress.updates += 1
        self.progress.stepped |= outcome.stepped

    def _due(self) -> list[int]:
        """Whose gradients make the next update: those of all, or of the one that came first."""
        if self.updates == "synchronous":
            waited_for = [w for w in self._admitted if w not in self._pending and not self.clocks.finished(w)]
            return [] if waited_for else sorted(self._pending)
        return sorted(self._pending, key=lambda worker: self._heard[worker])[:1]

    def _goes_on(self, worker: int, after: dict[int, int]) -> bool:
        ended = worker in self.clocks.ended
        reached = self.clocks.total is not None and after[worker] >= self.clocks.total
        return not ended and not reached and self.clocks.may_go_on(worker, after)

    def _idle(self, updates: Sequence[int] = ()) -> list[int]:
        """Those that wait for a reply and whose gradients are applied, or about to be."""
        return [
            worker
            for worker in self._admitted
            if self.desk.seats[worker].idle and (worker not in self._pending or worker in updates)
        ]

    def _signs_of_life(self, answered: set[int]) -> dict[int, Do]:
        """Nobody shall take a long wait for a hang."""
        now = time.monotonic()
        seats = {worker: self.desk.seats[worker] for worker in self._admitted if worker not in answered}
        late = [w for w, seat in seats.items() if seat.idle and now - seat.since_s > self.timeout_s / 3]
        return dict.fromkeys(late, Do.WAIT)

    def _reply(self, worker: int, do: Do, parts: Any) -> Reply:
        clock = self.clocks.alive[worker]
        epoch, index = self.position_at(clock)
        scale, good, skipped = self.loss_scale
        outcome = self._outcomes.get(worker, Outcome(False, 0.0, 0.0))
        part, of = parts[worker] if parts and worker in parts else (0, 1)
        return Reply(
            do=do,
            version=self.version,
            clock=clock,
            epoch=epoch,
            index=index,
            seed=self.seed,
            divided=self.divided,
            part=part,
            parts=of,
            stepped=int(outcome.stepped),
            good=good,
            skipped=skipped,
            scale=scale,
            loss=outcome.loss,
            norm=outcome.norm,
        )

    # ---- who is there

    def _gather(self) -> None:
        """All workers begin together; later on, who is missing is done without."""
        if self._heard:
            return
        if not self.desk.wait(lambda: len(self.desk.seats) == self.workers, self.timeout_s):
            missing = [worker for worker in range(self.workers) if worker not in self.desk.seats]
            named = ", ".join(f"worker {worker}{self.seen(worker)}" for worker in missing)
            raise CollectiveError(f"server 0: no answer within {self.timeout_s:g} s from {named}")

    def _joining(self) -> list[int]:
        """Those that came since the last round, and take part from now on."""
        new = [worker for worker in list(self.desk.seats) if worker not in self._admitted]
        for worker in sorted(new):
            seat = self.desk.seats[worker]
            if seat.error is not None:
                continue
            self._admitted[worker] = seat.life
            if worker in self._heard or seat.life > 1:
                clock = self.clocks.join(worker)
                self.rejoined += 1
                self.say(f"worker {worker} is back, at batch {clock}")
            else:
                self.clocks.join(worker, self.starts.get(worker))
            self._heard[worker] = 0
        return [worker for worker in new if worker in self._admitted]

    def _listen(self) -> dict[int, int]:
        """Takes note of what workers have said; returns the lives that are over."""
        lost = {}
        for worker, life in list(self._admitted.items()):
            seat = self.desk.seats.get(worker)
            if seat is None or seat.life != life or seat.error is not None:
                if seat is not None and seat.life == life:
                    self._complain(seat)
                lost[worker] = life
                self._lose(worker)
            elif seat.heard > self._heard[worker]:
                self._heard[worker] = seat.heard
                assert seat.told is not None
                self._note(worker, seat.told, seat.findings)
        return lost

    def _complain(self, seat: Seat) -> None:
        try:
            raise_if_late(seat)
        except CollectiveError as error:
            raise CollectiveError(f"server 0, step {self.clocks.step}: {error}{self.seen(seat.worker)}") from error

    def _note(self, worker: int, told: Told, findings: bytes) -> None:
        self.peak_bytes = max(self.peak_bytes, told.peak_bytes)
        if told.said == Said.GRADIENTS:
            self._pending[worker] = told
            if worker == min(self._admitted):
                self.loss_scale = (told.scale, told.good, told.skipped)
        elif told.said == Said.EVALUATED:
            self._evaluated[worker] = pickle.loads(findings)
        elif told.said == Said.ENDED:
            self.clocks.ended.add(worker)

    def _lose(self, worker: int) -> None:
        self._admitted.pop(worker, None)
        self._pending.pop(worker, None)
        self.clocks.drop(worker)
        what = "the mean is over the samples of the others" if self.updates == "synchronous" else "the others go on"
        self.say(f"worker {worker} is gone after step {self.clocks.step}{self.seen(worker)}: {what}")

    def _rest(self, news: int) -> None:
        """Waits for something to happen."""
        if self._admitted:
            self._alone_since_s = 0.0
        elif not self._alone_since_s:
            self._alone_since_s = time.monotonic()
        elif time.monotonic() - self._alone_since_s > self.timeout_s:
            raise CollectiveError(f"server 0, step {self.clocks.step}: no worker came within {self.timeout_s:g} s")
        self.desk.wait_for_news(news, min(1.0, self.timeout_s / 4))

    # ---- evaluation

    def evaluate(self, interrupted: Callable[[], bool]) -> list[Totals] | None:
        """Every worker that is there evaluates a part of the data, on the weights as they are: nothing is applied
        meanwhile. The part of one that dies is done by another."""
        self._gather()
        self._joining()
        parts = max(1, len(self._admitted))
        todo = list(range(parts))
        doing: dict[int, int] = {}  # which part each is at
        found: dict[int, Totals] = {}
        gave_up = False
        self._evaluated.clear()
        while len(found) < parts and not (gave_up and not doing):
            news = self.desk.news
            gave_up = gave_up or interrupted()
            dropped = self._listen()
            self._joining()
            for worker in [w for w in doing if w not in self._admitted]:
                todo.append(doing.pop(worker))
            for worker, (stopped, totals) in self._evaluated.items():
                if worker in doing:
                    part = doing.pop(worker)
                    gave_up |= stopped
                    found[part] = totals
            self._evaluated.clear()
            free = [w for w in self._admitted if self.desk.seats[w].idle and w not in doing]
            given = {} if gave_up else dict(zip(free, todo, strict=False))
            todo = [part for part in todo if part not in given.values()]
            doing |= given
            replies = dict.fromkeys(given, Do.EVALUATE) | self._signs_of_life({*given, *doing})
            if dropped or replies:
                self._carry_out([], replies, dropped, {w: (part, parts) for w, part in given.items()})
            else:
                self._rest(news)
        return None if gave_up else [found[part] for part in range(parts)]

    # ---- the end

    def stop(self) -> None:
        """Tells everybody to go home; who has something to say is heard out."""
        self._joining()
        while self._admitted:
            news = self.desk.news
            dropped = self._listen()
            replies = {w: Do.STOP for w in self._admitted if self.desk.seats[w].idle}
            if dropped or replies:
                self._carry_out([], replies, dropped)
                for worker in replies:
                    self._admitted.pop(worker, None)
            else:
                self._rest(news)

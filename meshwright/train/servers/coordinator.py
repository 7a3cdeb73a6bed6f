"""`Coordinator`: the decisions of the first server: which workers' gradients are combined into the next update, which
workers get a reply, and which worker evaluates which part of the data. The other servers carry out the same decisions
through `ServerRounds`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.connections import Connections
from meshwright.train.servers.messages import Instruction, ServerReply, WorkerReport
from meshwright.train.servers.parameter_shard import UpdateResult
from meshwright.train.servers.participants import Participants, Totals
from meshwright.train.servers.rounds import RoundOrder, ServerRounds

Position = tuple[int, int]


@dataclass
class Staleness:
    """The staleness of all gradients that were applied: how many updates were made between sending a worker its weights
    and applying the gradients that it computed on them. `pushes` is the number of gradients, `total` and `largest` are
    the sum and the maximum of their staleness."""

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
class StepProgress:
    """Sums over the gradients that were applied since the run's last step ended: their samples, losses and counts
    (numbers of targets). `stepped`: whether any update changed the weights. `left_out`: number of updates that were
    left out because the loss or some gradient was not finite."""

    samples: int = 0
    loss: float = 0.0
    count: float = 0.0
    stepped: bool = False
    left_out: int = 0

    def add(self, report: WorkerReport) -> None:
        self.samples += report.samples
        self.loss += report.loss
        self.count += report.count


@dataclass
class Coordinator:
    """Decides what all servers do, and holds the state of the run on the first server. `version`: number of updates so
    far. `positions` maps clocks (numbers of completed batches) to the epoch and the index of the batch that come next.
    `data_parts`: number of fixed parts of the data set with `data.partition: sample`, otherwise 0."""

    rounds: ServerRounds
    participants: Participants
    seed: int
    data_parts: int = 0
    version: int = 0
    staleness: Staleness = field(default_factory=Staleness)
    progress: StepProgress = field(default_factory=StepProgress)
    positions: dict[int, Position] = field(default_factory=dict)
    _results: dict[int, UpdateResult] = field(default_factory=dict)  # of each worker's last gradients

    @property
    def clocks(self) -> WorkerClocks:
        return self.participants.clocks

    @property
    def _connections(self) -> Connections:
        return self.participants.connections

    # ---- a step of the run

    def step(self, steps: int) -> StepProgress:
        """Applies the gradients that workers push, until the run is one step further than `steps` or all workers are
        finished. Returns the sums over the gradients that were applied."""
        self.participants.wait_for_all()
        self.progress = StepProgress() if self.clocks.step <= steps else self.progress
        while self.clocks.step <= steps and not self.clocks.all_finished:
            events = self._connections.events
            if not self._run_round():
                self.participants.wait_for_event(events)
        oldest = min([min(self.clocks.step, steps + 1), *self.clocks.by_worker.values()])
        self.positions = {clock: at for clock, at in self.positions.items() if clock >= oldest} or self.positions
        return self.progress

    def position_at(self, clock: int) -> Position:
        """The epoch and the index of the batch that come next after `clock` batches, or after the largest known number
        of batches below it."""
        return self.positions[max((known for known in self.positions if known <= clock), default=min(self.positions))]

    def _run_round(self) -> bool:
        """Runs one round of all servers: handles new reports, makes at most one update, and replies to workers that may
        continue. Returns False if there was nothing to do."""
        dropped = self.participants.read_reports()
        new = self.participants.admit_new()
        updates = self._next_update()
        clocks = {worker: clock + (worker in updates) for worker, clock in self.clocks.by_worker.items()}
        replies = {
            worker: Instruction.STEP for worker in self._answerable(updates) if self._may_continue(worker, clocks)
        }
        replies |= self.participants.keep_alive_replies(set(replies) | set(updates))
        if not (dropped or new or updates or replies):
            return False
        self._carry_out(updates, replies, dropped)
        return True

    def _carry_out(
        self,
        updates: Sequence[int],
        replies: dict[int, Instruction],
        dropped: dict[int, int],
        eval_parts: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        """Runs one round on all servers: one update with the gradients of the workers `updates`, then the `replies`.
        `dropped` are incarnations that are gone. `eval_parts` has, for workers that are told to evaluate, the part and
        the number of parts."""
        concerned = {*updates, *replies}
        incarnations = {worker: self.participants.admitted[worker] for worker in sorted(concerned)}
        missing = self.rounds.begin(RoundOrder(incarnations, updates, replies, dropped))
        for worker in missing:
            self.participants.remove(worker)
        applied = [worker for worker in updates if worker not in missing]
        if applied:
            self._apply(applied)
        messages = {}
        for worker, instruction in sorted(replies.items()):
            if worker not in missing:
                if instruction == Instruction.STEP:
                    self.clocks.note_continued(worker)
                messages[worker] = self._reply(worker, instruction, eval_parts or {})
        self.rounds.answer(messages)

    def _apply(self, workers: Sequence[int]) -> None:
        """Makes one update with the gradients of these workers."""
        result = self.rounds.update(workers)
        for worker in workers:
            report = self.participants.pending.pop(worker)
            self._results[worker] = result
            if result.stepped:
                self.staleness.add(self.version - report.version)
            self.clocks.advance(worker)
            clock = self.clocks.by_worker[worker]
            self.positions[clock] = (report.epoch + 1, 0) if report.last else (report.epoch, report.index + 1)
            self.progress.add(report)
        self.version += result.stepped
        self.progress.stepped |= result.stepped
        self.progress.left_out += result.nonfinite

    def _next_update(self) -> list[int]:
        """The workers whose gradients make the next update. With synchronous updates: all that pushed, once every
        worker has pushed or is finished, and none before. Otherwise: the worker that pushed first."""
        pending = self.participants.pending
        if self.participants.updates == "synchronous":
            is_complete = all(
                worker in pending or self.clocks.is_finished(worker) for worker in self.participants.admitted
            )
            return sorted(pending) if is_complete else []
        return sorted(pending, key=lambda worker: self.participants.report_numbers[worker])[:1]

    def _may_continue(self, worker: int, clocks: dict[int, int]) -> bool:
        """Whether a worker may compute its next gradients. `clocks` are the clocks after the update of this round."""
        is_out_of_data = worker in self.clocks.out_of_data
        is_done = self.clocks.total is not None and clocks[worker] >= self.clocks.total
        return not is_out_of_data and not is_done and self.clocks.may_continue(worker, clocks)

    def _answerable(self, updates: Sequence[int]) -> list[int]:
        """The workers that wait for a reply and whose gradients are applied already, or in this round (`updates`)."""
        pending = self.participants.pending
        return [worker for worker in self.participants.idle() if worker not in pending or worker in updates]

    def _reply(self, worker: int, instruction: Instruction, eval_parts: Mapping[int, tuple[int, int]]) -> ServerReply:
        clock = self.clocks.by_worker[worker]
        epoch, index = self.position_at(clock)
        scale, good, skipped = self.participants.loss_scale
        result = self._results.get(worker, UpdateResult(False, 0.0, 0.0))
        part, parts = eval_parts.get(worker, (0, 1))
        return ServerReply(
            instruction=instruction,
            version=self.version,
            clock=clock,
            epoch=epoch,
            index=index,
            seed=self.seed,
            data_parts=self.data_parts,
            part=part,
            parts=parts,
            stepped=int(result.stepped),
            good=good,
            skipped=skipped,
            scale=scale,
            loss=result.loss,
            norm=result.norm,
        )

    # ---- evaluation

    def evaluate(self, interrupted: Callable[[], bool]) -> list[Totals] | None:
        """Has every worker evaluate a part of the data with the current weights. Returns the totals of each part; None
        if the evaluation was interrupted. No updates are applied meanwhile. If a worker dies, another one evaluates its
        part."""
        participants = self.participants
        participants.wait_for_all()
        participants.admit_new()
        parts = max(1, len(participants.admitted))
        unassigned = list(range(parts))
        assigned: dict[int, int] = {}  # the part that each worker evaluates
        totals: dict[int, Totals] = {}
        gave_up = False
        participants.evaluations.clear()
        while len(totals) < parts and not (gave_up and not assigned):
            events = self._connections.events
            gave_up = gave_up or interrupted()
            dropped = participants.read_reports()
            participants.admit_new()
            for worker in [w for w in assigned if w not in participants.admitted]:
                unassigned.append(assigned.pop(worker))
            for worker, (was_interrupted, part_totals) in participants.evaluations.items():
                if worker in assigned:
                    gave_up |= was_interrupted
                    totals[assigned.pop(worker)] = part_totals
            participants.evaluations.clear()
            free = [worker for worker in participants.idle() if worker not in assigned]
            new = {} if gave_up else dict(zip(free, unassigned, strict=False))
            unassigned = [part for part in unassigned if part not in new.values()]
            assigned |= new
            replies = dict.fromkeys(new, Instruction.EVALUATE) | participants.keep_alive_replies({*new, *assigned})
            if dropped or replies:
                self._carry_out([], replies, dropped, {worker: (part, parts) for worker, part in new.items()})
            else:
                participants.wait_for_event(events)
        return None if gave_up else [totals[part] for part in range(parts)]

    # ---- the end

    def stop(self) -> None:
        """Tells every worker to stop. A worker that is still computing is told after its report has come."""
        participants = self.participants
        participants.admit_new()
        while participants.admitted:
            events = self._connections.events
            dropped = participants.read_reports()
            replies = dict.fromkeys(participants.idle(), Instruction.STOP)
            if dropped or replies:
                self._carry_out([], replies, dropped)
                for worker in replies:
                    participants.admitted.pop(worker, None)
            else:
                participants.wait_for_event(events)

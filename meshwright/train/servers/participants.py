"""`Participants`: which workers take part in the run, and the reports that the coordinator has not handled yet."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from meshwright.errors import CollectiveError
from meshwright.messages.plain_values import DamagedValueError, from_text
from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.connections import Connection, Connections
from meshwright.train.servers.messages import Instruction, ReportKind, WorkerReport
from meshwright.train.servers.rounds import raise_if_timed_out

Updates = Literal["synchronous", "asynchronous", "bounded"]
Totals = dict[str, Tensor]


@dataclass
class Participants:
    """The workers that take part in the run. A worker takes part from the round after it has connected until its
    connection breaks.

    `workers`: number of workers in the plan. `admitted`: the incarnation of each worker that takes part. `pending`: by
    worker, reports of gradients that are not applied yet. `evaluations`: by worker, results of evaluations that are not
    collected yet: whether it was interrupted, and its totals. `loss_scale`: value, good steps and skipped steps of the
    fp16 loss scale. `start_clocks`: the clocks at which workers of a resumed run start. `print_line` prints a line to
    the user, and `last_seen` describes a worker's last heartbeat for it.
    """

    connections: Connections
    clocks: WorkerClocks
    workers: int
    updates: Updates
    timeout_s: float
    print_line: Callable[[str], None] = lambda line: None
    last_seen: Callable[[int], str] = lambda worker: ""
    start_clocks: dict[int, int] = field(default_factory=dict)
    admitted: dict[int, int] = field(default_factory=dict)
    pending: dict[int, WorkerReport] = field(default_factory=dict)
    evaluations: dict[int, tuple[bool, Totals]] = field(default_factory=dict)
    loss_scale: tuple[float, int, int] = (0.0, 0, 0)
    peak_bytes: int = 0
    rejoined: int = 0  # how often a worker came back
    report_numbers: dict[int, int] = field(default_factory=dict)  # number of the last handled report of each worker
    _empty_since_s: float = 0.0  # when the last worker left; 0 while there are workers

    def wait_for_all(self) -> None:
        """Before the first round, waits until all workers are connected. Does nothing later, because the run then
        continues without missing workers."""
        if self.report_numbers:
            return
        by_worker = self.connections.by_worker
        if not self.connections.wait(lambda: len(by_worker) == self.workers, self.timeout_s):
            missing = [worker for worker in range(self.workers) if worker not in by_worker]
            names = ", ".join(f"worker {worker}{self.last_seen(worker)}" for worker in missing)
            raise CollectiveError(f"server 0: no answer within {self.timeout_s:g} s from {names}")

    def admit_new(self) -> list[int]:
        """Admits the workers that have connected since the last round, and returns them."""
        new = [worker for worker in list(self.connections.by_worker) if worker not in self.admitted]
        for worker in sorted(new):
            connection = self.connections.by_worker[worker]
            if connection.error is not None:
                continue
            self.admitted[worker] = connection.incarnation
            if worker in self.report_numbers or connection.incarnation > 1:
                clock = self.clocks.add(worker)
                self.rejoined += 1
                self.print_line(f"worker {worker} is back, at batch {clock}")
            else:
                self.clocks.add(worker, self.start_clocks.get(worker))
            self.report_numbers[worker] = 0
        return [worker for worker in new if worker in self.admitted]

    def read_reports(self) -> dict[int, int]:
        """Sorts new reports into `pending` and `evaluations`, and removes workers whose connection broke, or whose
        evaluation result cannot be read. Returns the incarnations of the removed workers, by worker."""
        dropped = {}
        for worker, incarnation in list(self.admitted.items()):
            connection = self.connections.by_worker.get(worker)
            is_current = connection is not None and connection.incarnation == incarnation
            if connection is None or not is_current or connection.error is not None:
                if connection is not None and is_current:
                    self._raise_if_timed_out(connection)
                dropped[worker] = incarnation
                self.remove(worker)
            elif connection.report_number > self.report_numbers[worker]:
                self.report_numbers[worker] = connection.report_number
                assert connection.report is not None
                try:
                    self._handle(worker, connection.report, connection.evaluation_result)
                except DamagedValueError as error:
                    self.print_line(f"worker {worker} is dropped: its evaluation result cannot be read: {error}")
                    dropped[worker] = incarnation
                    self.remove(worker)
        return dropped

    def remove(self, worker: int) -> None:
        """Removes a worker that is gone, and tells the user that the run continues without it."""
        self.admitted.pop(worker, None)
        self.pending.pop(worker, None)
        self.clocks.remove(worker)
        effect = (
            "the mean is over the samples of the others" if self.updates == "synchronous" else "the others continue"
        )
        self.print_line(f"worker {worker} is gone after step {self.clocks.step}{self.last_seen(worker)}: {effect}")

    def idle(self) -> list[int]:
        """The workers that wait for a reply."""
        return [worker for worker in self.admitted if self.connections.by_worker[worker].idle]

    def keep_alive_replies(self, answered: set[int]) -> dict[int, Instruction]:
        """Returns the instruction to wait for each worker that is not `answered` in this round and has been idle so
        long that its connection could time out."""
        now = time.monotonic()
        longest_s = self.timeout_s / 3
        waiting = [worker for worker in self.idle() if worker not in answered]
        late = [w for w in waiting if now - self.connections.by_worker[w].idle_since_s > longest_s]
        return dict.fromkeys(late, Instruction.WAIT)

    def wait_for_event(self, since: int) -> None:
        """Waits briefly for an event after number `since`. Raises an error if no worker has taken part for longer than
        the timeout."""
        if self.admitted:
            self._empty_since_s = 0.0
        elif not self._empty_since_s:
            self._empty_since_s = time.monotonic()
        elif time.monotonic() - self._empty_since_s > self.timeout_s:
            raise CollectiveError(f"server 0, step {self.clocks.step}: no worker came within {self.timeout_s:g} s")
        self.connections.wait_for_event(since, min(1.0, self.timeout_s / 4))

    def _raise_if_timed_out(self, connection: Connection) -> None:
        try:
            raise_if_timed_out(connection)
        except CollectiveError as error:
            last_seen = self.last_seen(connection.worker)
            raise CollectiveError(f"server 0, step {self.clocks.step}: {error}{last_seen}") from error

    def _handle(self, worker: int, report: WorkerReport, evaluation_result: bytes) -> None:
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes)
        if report.kind == ReportKind.GRADIENTS:
            self.pending[worker] = report
            if worker == min(self.admitted):
                self.loss_scale = (report.scale, report.good, report.skipped)
        elif report.kind == ReportKind.EVALUATED:
            self.evaluations[worker] = _read_evaluation(evaluation_result)
        elif report.kind == ReportKind.OUT_OF_DATA:
            self.clocks.out_of_data.add(worker)


def _read_evaluation(data: bytes) -> tuple[bool, Totals]:
    """Returns what a worker's `send_evaluation` sent: whether it was interrupted, and its totals. Raises
    DamagedValueError if it is anything else."""
    match from_text(data):
        case (bool(interrupted), dict(totals)) if all(isinstance(total, Tensor) for total in totals.values()):
            return interrupted, totals
    raise DamagedValueError("it is not a flag and the totals of metrics")

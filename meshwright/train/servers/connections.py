"""A server's connections to its workers. One thread per worker sends the replies and receives the reports. The server's
main thread reads the `Connection` objects and does all computation."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from meshwright.errors import CollectiveError
from meshwright.processes.peer_connection import ConnectToStore, PeerConnection
from meshwright.train.servers.messages import Instruction, MessageBuffer, ReportKind, ServerReply, WorkerReport
from meshwright.train.servers.parameter_shard import ParameterShard

POLL_S = 0.02  # how often a thread looks whether its worker has started (again)


@dataclass
class Connection:
    """The connection to one worker. A worker process that is started again is the same worker in its next
    `incarnation`.

    `idle`: the worker waits for a reply. `report`: its last report. `evaluation_result`: the bytes that came with this
    report if it reports an evaluation, otherwise empty. `push` holds the worker's last gradients, and `pushed` is the
    report that came with them. `reply`: the memory of the replies to it. `error` is set when the worker is gone or did
    not answer in time. `stopped`: the instruction to stop was sent to it.
    """

    worker: int
    incarnation: int
    push: MessageBuffer
    reply: MessageBuffer
    idle: bool = True
    report: WorkerReport | None = None
    pushed: WorkerReport | None = None
    evaluation_result: bytes = b""
    error: CollectiveError | None = None
    stopped: bool = False
    report_number: int = 0  # how many reports of all workers had come with its last one; 0: none yet
    idle_since_s: float = field(default_factory=time.monotonic)
    _reply_ready: bool = False
    _stopping: bool = False


class Connections:
    """Accepts connections of workers at any time, and runs one thread for each worker. `by_worker` holds the current
    connection of each worker that has connected, until it is dropped."""

    def __init__(
        self, server: int, workers: int, shard: ParameterShard, connect: ConnectToStore, timeout_s: float
    ) -> None:
        self._server = server
        self._shard = shard
        self._connect = connect
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._events = 0
        self._reports = 0
        self.by_worker: dict[int, Connection] = {}
        for worker in range(workers):
            threading.Thread(target=self._serve_worker, args=(worker,), daemon=True, name=f"worker {worker}").start()

    # ---- called by the server's main thread

    def wait(self, until: Callable[[], bool], seconds: float) -> bool:
        """Waits until the condition holds, at most `seconds`, in short intervals so that signals are handled. Returns
        whether it holds."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not until():
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    return False
                self._changed.wait(min(remaining_s, 0.2))
            return True

    def wait_for_event(self, since: int, seconds: float) -> None:
        """Waits until `events` is no longer `since`, at most `seconds`."""
        self.wait(lambda: self._events != since, seconds)

    @property
    def events(self) -> int:
        """Number of events so far: workers that came, reported, failed or stopped."""
        return self._events

    def send_reply(self, worker: int, reply: ServerReply) -> None:
        """Copies the current weights into the worker's reply, and tells the worker's thread to send it. Before the
        first reply, that thread sends the frozen parameters."""
        connection = self.by_worker[worker]
        assert connection.idle, f"worker {worker} has not answered the last reply"
        if not connection.report_number:
            self._shard.fill_frozen()
        self._shard.fill_reply(connection.reply, reply)
        with self._changed:
            connection.idle, connection._reply_ready = False, True
            connection._stopping = reply.instruction == Instruction.STOP
            self._changed.notify_all()

    def drop(self, worker: int, incarnation: int) -> None:
        """Removes the connection of a worker if it is of this incarnation or an earlier one. The worker's thread then
        waits for the next incarnation."""
        with self._changed:
            connection = self.by_worker.get(worker)
            if connection is None or connection.incarnation > incarnation:
                return
            del self.by_worker[worker]
            connection.error = connection.error or CollectiveError(f"worker {worker} was dropped")
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        """Waits, at most `seconds`, until every instruction to stop was sent, and ends the threads."""
        self.wait(lambda: all(c.stopped or c.error for c in self.by_worker.values() if c._stopping), seconds)
        self._closed.set()  # ends the threads that still wait for workers to come back

    # ---- the thread of one worker

    def _serve_worker(self, worker: int) -> None:
        """Connects to each incarnation of a worker in turn, until one of them is told to stop or `close` is called."""
        incarnation = 0
        store = self._connect()
        while (next_incarnation := self._next_incarnation(store, worker, incarnation)) is not None:
            incarnation = next_incarnation
            name = f"worker {worker} (rank {worker})"
            try:
                pair = PeerConnection(pair_store(store, self._server, worker, incarnation), True, name, self._timeout_s)
            except CollectiveError:
                continue  # the worker died before it connected
            connection = Connection(worker, incarnation, self._shard.push_buffer(worker), self._shard.reply_buffer())
            with self._changed:
                self.by_worker[worker] = connection
                self._notify()
            try:
                self._exchange(connection, pair)
                return
            except Exception as error:
                with self._changed:
                    connection.error = error if isinstance(error, CollectiveError) else CollectiveError(repr(error))
                    self._notify()

    def _exchange(self, connection: Connection, pair: PeerConnection) -> None:
        """Sends replies and receives reports in turn. Returns after sending the instruction to stop."""
        header = torch.empty(WorkerReport.size(), dtype=torch.uint8)
        is_first = True
        while True:
            with self._changed:
                self._changed.wait_for(lambda: connection._reply_ready or connection.error is not None)
                if connection.error is not None:
                    raise connection.error
                connection._reply_ready = False
            if is_first and self._shard.frozen:
                pair.send(self._shard.frozen.memory)
            is_first = False
            pair.send(connection.reply.memory)
            if connection._stopping:
                with self._changed:
                    connection.stopped = True
                    self._notify()
                return
            pair.receive(header)
            report, evaluation_result = WorkerReport.unpack(header), b""
            if report.kind == ReportKind.GRADIENTS:
                pair.receive(connection.push.memory)
            elif report.result_bytes:
                data = torch.empty(report.result_bytes, dtype=torch.uint8)
                pair.receive(data)
                evaluation_result = data.numpy().tobytes()
            with self._changed:
                self._note_report(connection, report, evaluation_result)

    def _note_report(self, connection: Connection, report: WorkerReport, evaluation_result: bytes) -> None:
        self._reports += 1
        connection.pushed = report if report.kind == ReportKind.GRADIENTS else connection.pushed
        connection.report, connection.evaluation_result = report, evaluation_result
        connection.report_number = self._reports
        connection.idle, connection.idle_since_s = True, time.monotonic()
        self._notify()

    def _next_incarnation(self, store: dist.Store, worker: int, known: int) -> int | None:
        """Waits until an incarnation of the worker after the `known` one announces itself, and returns its number; None
        if `close` was called."""
        while not self._closed.wait(POLL_S):
            with suppress(RuntimeError):  # at the end of the run the store may be gone already
                incarnation = int(store.add(f"life/{worker}", 0))
                if incarnation > known:
                    return incarnation
        return None

    def _notify(self) -> None:
        self._events += 1
        self._changed.notify_all()


def announce(store: dist.Store, worker: int) -> int:
    """Announces a worker to the servers, and returns the number of this incarnation of it, from 1 on."""
    return int(store.add(f"life/{worker}", 1))


def pair_store(store: dist.Store, server: int, worker: int, incarnation: int) -> dist.Store:
    """The store in which a server and one incarnation of a worker find each other."""
    return dist.PrefixStore(f"pair/{server}-{worker}-{incarnation}", store)

"""`ElasticJob`: starts workers, gives out ranks whenever their number changes, and replaces workers that die.

Workers ask for ranks in `hvd.init()` (engine/driver_link.py). When all workers that live have asked, each gets its rank
in a new attempt. Workers that took part before have the lowest ranks, in their old order, because rank 0 is the one
whose state the others get.
"""

import os
import secrets
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

from meshwright.compat.horovod.engine.frames import FrameReader, send_frame
from meshwright.compat.horovod.launcher.arguments import LaunchOptions, local_slots
from meshwright.compat.horovod.launcher.static import describe_exit
from meshwright.compat.horovod.launcher.worker_process import WorkerProcess, shared_variables, show_output
from meshwright.compat.horovod.variables import DRIVER, WORKER
from meshwright.errors import InputError, RankError
from meshwright.processes.local.rank_output import Screen
from meshwright.processes.loopback import ADDRESS, serve_store
from meshwright.processes.network.own_user import accept_own_user
from meshwright.processes.output import print_to_user

_POLL_S = 0.1
_DISCOVERY_S = 1.0
_MOST_FAILURES = 3  # of the workers of one slot, after which the slot is given up
_REMOVED, _ADDED = 1, 2


@dataclass(eq=False)
class _Worker:
    """A worker that was started. `rank` is that of the last attempt, None before the first."""

    slot: int
    process: WorkerProcess
    connection: socket.socket | None = None
    reader: FrameReader | None = None
    waits: bool = False
    rank: int | None = None


class ElasticJob:
    """An elastic job on this machine, from the start of its workers to their end."""

    def __init__(self, options: LaunchOptions) -> None:
        self._options = options
        self._screen = Screen()
        self._workers: dict[str, _Worker] = {}
        self._failures: dict[int, int] = {}
        self._attempt = -1
        self._started = self._replaced = 0
        self._finished = False
        self._next_discovery = 0.0
        self._slots = options.np
        self._last_failure = self._late_failure = ""

    def run(self) -> None:
        """Returns when all workers are done. Raises `RankError` when too few are left."""
        store, port = serve_store()
        threads = max(1, (os.cpu_count() or 1) // self._options.max_np)
        self._variables = {
            **shared_variables(port, self._options.max_np, threads),
            **self._options.variables,
            "HOROVOD_ELASTIC": "1",
        }
        self._unclaimed: list[tuple[socket.socket, FrameReader]] = []
        with socket.create_server((ADDRESS, 0)) as self._listener:
            try:
                self._discover()
                self._start_missing()
                while self._workers:
                    self._step()
            finally:
                for worker in self._workers.values():
                    worker.process.kill()
                    worker.process.close()
                self._screen.end_lines()
        del store  # the workers needed it until here
        if self._late_failure:
            raise RankError(self._late_failure)

    def _step(self) -> None:
        connections = [worker.connection for worker in self._workers.values() if worker.connection is not None]
        others = [self._listener, *connections, *(connection for connection, _ in self._unclaimed)]
        processes = [worker.process for worker in self._workers.values()]
        for ready in show_output(processes, _POLL_S, others):
            self._receive(ready)
        self._reap()
        if not self._finished:
            self._discover()
            self._start_missing()
        self._assign()

    def _start_missing(self) -> None:
        """Starts workers in the slots that have none."""
        taken = {worker.slot for worker in self._workers.values()}
        given_up = {slot for slot, failures in self._failures.items() if failures >= _MOST_FAILURES}
        free = [slot for slot in range(self._options.max_np) if slot not in taken | given_up]
        missing = self._slots - len(given_up) - len(taken)
        limit = self._options.reset_limit
        for slot in free[: max(0, missing)]:
            if self._attempt >= 0 and limit is not None and self._replaced >= limit:
                break
            self._replaced += self._attempt >= 0
            name = f"worker{self._started} {secrets.token_hex(16)}"  # nobody else can say that he is this worker
            self._started += 1
            variables = {
                **self._variables,
                DRIVER: f"{ADDRESS}:{self._listener.getsockname()[1]}",
                WORKER: name,
                **{f"HOROVOD_{key}": str(slot) for key in ("RANK", "LOCAL_RANK")},
                **{f"HOROVOD_{key}": str(self._slots) for key in ("SIZE", "LOCAL_SIZE")},
            }
            options = self._options
            process = WorkerProcess(options.command, slot, variables, self._screen, options.output_folder)
            self._workers[name] = _Worker(slot, process)
        if len(self._workers) < self._options.min_np:
            raise RankError(
                f"{len(self._workers)} workers are left, fewer than --min-np {self._options.min_np}{self._last_failure}"
            )

    def _receive(self, ready: socket.socket) -> None:
        if ready is self._listener:
            if (accepted := accept_own_user(self._listener)) is not None:
                self._unclaimed.append((accepted[0], FrameReader(accepted[0])))
            return
        for connection, reader in list(self._unclaimed):
            if connection is ready:
                frames = reader.available()
                if frames == []:  # its first message has not arrived completely
                    return
                name = frames[0].get("worker") if frames and isinstance(frames[0], dict) else None
                self._unclaimed.remove((connection, reader))
                if frames and isinstance(name, str) and name in self._workers:
                    self._workers[name].connection, self._workers[name].reader = connection, reader
                    self._workers[name].waits = any("join" in frame for frame in frames[1:])
                else:
                    print_to_user("refused: a process that is no worker of this job connected to it")
                    connection.close()
                return
        for worker in self._workers.values():
            if worker.connection is ready and worker.reader is not None:
                received = worker.reader.available()
                if received is None:
                    worker.connection = None
                else:
                    worker.waits = worker.waits or any("join" in frame for frame in received)

    def _reap(self) -> None:
        """Removes the workers that have ended. If one has failed, the others are told."""
        for name, worker in list(self._workers.items()):
            code = worker.process.poll()
            if code is None:
                continue
            del self._workers[name]
            worker.process.close()
            if code == 0:
                self._finished = self._finished or worker.rank is not None
                continue
            self._failures[worker.slot] = self._failures.get(worker.slot, 0) + 1
            self._last_failure = f": the last one {describe_exit(code)}"
            print(f"horovodrun: the worker of slot {worker.slot} {describe_exit(code)}", file=sys.stderr, flush=True)
            if self._finished:
                self._late_failure = f"the worker of slot {worker.slot} {describe_exit(code)} after others were done"
            if worker.rank is not None:
                self._tell({"lost": self._attempt})

    def _tell(self, frame: dict[str, object]) -> None:
        for worker in self._workers.values():
            if worker.connection is not None:
                try:
                    send_frame(worker.connection, frame)
                except OSError:
                    worker.connection = None

    def _discover(self) -> None:
        """Asks the discovery script for the number of slots, and tells the workers of a change."""
        if self._options.discovery is None or time.monotonic() < self._next_discovery:
            return
        self._next_discovery = time.monotonic() + _DISCOVERY_S
        command = os.path.abspath(self._options.discovery)
        run = subprocess.run([command], capture_output=True, text=True, check=False)
        if run.returncode:
            if self._attempt < 0:
                raise InputError(f"--host-discovery-script {command} ended with code {run.returncode}: {run.stderr}")
            return
        slots = min(local_slots(run.stdout.splitlines()), self._options.max_np)
        if slots == self._slots or slots < self._options.min_np:
            return
        change, self._slots = _ADDED if slots > self._slots else _REMOVED, slots
        self._failures = dict.fromkeys(self._failures, 0)
        if self._attempt >= 0:
            self._tell({"update": change})

    def _assign(self) -> None:
        """Begins a new attempt if all workers that live wait for it."""
        workers = list(self._workers.values())
        if not workers or not all(worker.waits and worker.connection is not None for worker in workers):
            return
        self._attempt += 1
        known = sorted((w for w in workers if w.rank is not None), key=lambda worker: worker.rank or 0)
        ordered = known + [worker for worker in workers if worker.rank is None]
        for worker in ordered[self._slots :]:
            worker.waits, worker.rank = False, None
            assert worker.connection is not None
            send_frame(worker.connection, {"exit": True})
        members = ordered[: self._slots]
        for rank, worker in enumerate(members):
            worker.rank, worker.waits = rank, False
            assert worker.connection is not None
            send_frame(worker.connection, {"attempt": self._attempt, "rank": rank, "size": len(members)})

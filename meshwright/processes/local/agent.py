"""Starts the ranks of one machine and watches them. `Agent` is the agent of torch elastic with other rules for failures
and stops.

It overrides or uses these private members of torch's agent, seen to work on torch 2.11, 2.13 and 2.15:
`_monitor_workers`, `_start_workers`, `_restart_workers`, `_remaining_restarts`, `_worker_group` and `_pcontext`.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.errors import Stopped
from meshwright.processes.environment import RESTART
from meshwright.processes.failure import Failure, first_cause, is_consequence, repeats, to_error
from meshwright.processes.local.fork_server import ForkedRank, ForkServer, ServerDied
from meshwright.processes.loopback import ADDRESS
from meshwright.processes.output import clear_progress, print_to_user
from meshwright.processes.signals import StopRequest
from meshwright.processes.stall.out_of_memory import killed_for_memory
from meshwright.processes.torch_private import elastic_processes_of, elastic_starts_ranks_with

POLL_S = 0.02
SETTLE_S = 1.0  # how long to wait for the cause of a failure that looks like a consequence
_REAP_S = 30.0


class SingleMachineRendezvous(RendezvousHandler):
    """The rendezvous of a single agent, which has no other agent to wait for and listens on no port."""

    def __init__(self, port: int) -> None:
        self._port = port

    def get_backend(self) -> str:
        return "one-machine"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo(ADDRESS, self._port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return "meshwright"

    def shutdown(self) -> bool:
        return True


class NoLogs(LogsSpecs):
    """Makes elastic write no files. Ranks write their own logs and records, and a killed launcher must leave no
    temporary files behind."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        no_files = dict.fromkeys(envs, "")
        return LogsDest(stdouts=no_files, stderrs=no_files, error_files=no_files)

    @property
    def root_log_dir(self) -> str:
        return ""


class Agent(LocalElasticAgent):
    """Restarts all ranks when one fails, unless a restart would only repeat the failure, and stops them on request.

    After a failure, elastic would send SIGTERM to the other ranks, and wait. But these ranks cannot continue without
    the failed one, and a rank that saves a checkpoint on SIGTERM would try to. Therefore they are killed at once, after
    the exit codes that show the cause were read.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        server: ForkServer,
        store: dist.Store,
        folder: Path,
        grace_s: float,
        stop: StopRequest,
    ) -> None:
        """Ranks write why they failed to `store`, and their logs to `folder`."""
        super().__init__(spec, NoLogs())
        self._server = server
        self._records = store
        self.restarts = 0
        self._server_deaths = 0  # they count as restarts
        self.failure: Failure | None = None
        self._folder = folder
        self._grace_s = grace_s
        self._stop = stop
        self._noticed: float | None = None  # when the last failure was noticed, until ranks are started again
        self._killed_before = killed_for_memory()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with elastic_starts_ranks_with(self._start_rank):
            started = super()._start_workers(worker_group)
        self._noticed = None
        return started

    def _start_rank(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        if self._noticed is not None:
            environment = {**environment, RESTART: f"{self._noticed} {time.time()}"}
        while True:
            try:
                return self._server.start_rank(str(self._worker_group.spec.entrypoint), arguments, environment)
            except ServerDied as error:
                if not self._may_restart():
                    raise
                self._server_deaths += 1
                used = self._restarts_used()
                print_to_user(f"{error}: it starts again ({used} of at most {self._max_restarts} times)")

    @property
    def _max_restarts(self) -> int:
        max_restarts: int = self._worker_group.spec.max_restarts
        return max_restarts

    def _restarts_used(self) -> int:
        """The number of restarts that count against the limit."""
        return self.restarts + self._server_deaths

    def _may_restart(self) -> bool:
        return self._restarts_used() < self._max_restarts

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restarts += 1
        if self.failure is not None:
            used = self._restarts_used()
            print_to_user(f"{self.failure.line}: all ranks start again ({used} of at most {self._max_restarts} times)")
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.requested:
            self._stop_ranks()
        exits = self._exits()
        if any(exits.values()):
            self._noticed = time.time()
            previous, self.failure = self.failure, self._find_cause()
            self._kill_ranks()
            is_final = self.failure is not None and (self.failure.final or repeats(self.failure, previous))
            if is_final or not self._may_restart():
                self._remaining_restarts = 0
        elif None in exits.values():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _processes(self) -> dict[int, ForkedRank]:
        """Returns the processes by rank. On one machine the local rank is the rank."""
        return elastic_processes_of(self._pcontext)

    def _exits(self) -> dict[int, int | None]:
        """Returns the exit codes by rank. The code of a rank that is running is None."""
        return {rank: process.poll() for rank, process in self._processes().items()}

    def _find_cause(self) -> Failure | None:
        """Returns the first cause of the failure, or None. If only consequences are known yet, it waits a moment for
        the cause."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            exits = self._exits()
            cause = self._cause(exits)
            settled = None not in exits.values() or time.monotonic() > deadline
            if settled or (cause is not None and not is_consequence(cause)):
                return cause
            time.sleep(POLL_S)

    def _cause(self, exits: dict[int, int | None]) -> Failure | None:
        codes = {rank: code for rank, code in exits.items() if code is not None}
        return first_cause(self._records, self._folder, self._attempt, codes, killed_for_memory() > self._killed_before)

    @property
    def _attempt(self) -> int:
        """How often the ranks were restarted before, as they know it."""
        return self.restarts

    def _stop_ranks(self) -> None:
        """Sends SIGTERM to the ranks, waits for them up to the grace period, kills those that still run, and raises
        `Stopped`."""
        received = self._stop.received
        self._end_ranks()
        cause = self._cause(self._exits())
        self._kill_ranks()
        # A failure while saving is an error. A rank that the signal killed, or that lost such a rank, is not.
        if cause is not None and cause.traceback and not is_consequence(cause):
            raise to_error(cause, self._folder)
        raise Stopped(f"stopped by {received.name if received else 'request'}")

    def _end_ranks(self) -> None:
        """Sends SIGTERM to the ranks, and waits for them up to the grace period."""
        for process in self._processes().values():
            # The signal goes to the rank, not to its process group: its data loaders must run until it has saved.
            if process.poll() is None:
                os.kill(process.pid, SIGTERM)
        self._wait_for_ranks(self._grace_s, until=lambda: self._stop.insisted)

    def _kill_ranks(self) -> None:
        """Kills every rank and the processes it started."""
        for process in self._processes().values():
            process.signal_group(SIGKILL)
        self._wait_for_ranks(_REAP_S)
        clear_progress()

    def _wait_for_ranks(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while None in self._exits().values() and time.monotonic() < deadline and not until():
            time.sleep(POLL_S)

"""Starts the ranks of one machine and watches them: torch elastic's agent, with our rules for ending."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from meshwright.errors import Stopped
from meshwright.launch.failure import Failure, first_cause, is_consequence, repeats, to_error
from meshwright.launch.loopback import ADDRESS
from meshwright.launch.output import clear_progress, tell
from meshwright.launch.signals import StopRequest

_POLL_S = 0.02
_SETTLE_S = 1.0  # how long a failure that looks like a consequence waits for its cause to show
_REAP_S = 30.0


class OneMachine(RendezvousHandler):
    """The rendezvous of a single agent: nobody to meet, so nothing to listen on."""

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
    """Elastic keeps no files: ranks write their own logs and records, and a kill must leave nothing behind."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        nothing = dict.fromkeys(envs, "")
        return LogsDest(stdouts=nothing, stderrs=nothing, error_files=nothing)

    @property
    def root_log_dir(self) -> str:
        return ""


class Agent(LocalElasticAgent):
    """Restarts all ranks when one fails, unless that would only repeat the failure; stops them when asked.

    Elastic sends the survivors of a failure a SIGTERM and waits. They are of no more use, and a rank that
    saves on SIGTERM would try to: here they are killed at once, after the exit codes that tell the cause
    were read.
    """

    def __init__(self, spec: WorkerSpec, folder: Path, grace_s: float, stop: StopRequest) -> None:
        super().__init__(spec, NoLogs())
        self.restarts = 0
        self.failure: Failure | None = None
        self._folder = folder
        self._grace_s = grace_s
        self._stop = stop

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self.restarts += 1
        if self.failure is not None:
            most = self._worker_group.spec.max_restarts
            tell(f"{self.failure.line}: all ranks start again ({self.restarts} of at most {most} times)")
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.requested:
            self._stop_ranks()
        exits = self._exits()
        if any(exits.values()):
            before, self.failure = self.failure, self._find_cause()
            self._kill_ranks()
            if self.failure is not None and (self.failure.final or repeats(self.failure, before)):
                self._remaining_restarts = 0
        elif None in exits.values():
            return RunResult(state=WorkerState.HEALTHY)
        return super()._monitor_workers(worker_group)

    def _pids(self) -> dict[int, int]:
        return self._pcontext.pids() if self._pcontext is not None else {}

    def _exits(self) -> dict[int, int | None]:
        """Exit codes by rank, None while one runs; on one machine the local rank is the rank."""
        return {rank: _exit_code(pid) for rank, pid in self._pids().items()}

    def _find_cause(self) -> Failure | None:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            exits = self._exits()
            cause = self._cause(exits)
            settled = None not in exits.values() or time.monotonic() > deadline
            if settled or (cause is not None and not is_consequence(cause)):
                return cause
            time.sleep(_POLL_S)

    def _cause(self, exits: dict[int, int | None]) -> Failure | None:
        codes = {rank: code for rank, code in exits.items() if code is not None}
        return first_cause(self._folder, self.restarts, codes)

    def _stop_ranks(self) -> None:
        """Asks the ranks to stop, waits for them as long as they were promised, and ends the launch."""
        received = self._stop.received
        for pid in self._pids().values():
            # The rank alone, not its group: its data loaders must live until it has saved.
            if _exit_code(pid) is None:
                os.kill(pid, signal.SIGTERM)
        self._wait_for_ranks(self._grace_s, until=lambda: self._stop.insisted)
        cause = self._cause(self._exits())
        self._kill_ranks()
        # Failing to save is news; dying of the signal, or of a peer that did, is what was asked for.
        if cause is not None and cause.traceback and not is_consequence(cause):
            raise to_error(cause, self._folder)
        raise Stopped(f"stopped by {received.name if received else 'request'}")

    def _kill_ranks(self) -> None:
        """Kills every rank and what it started. None was reaped before, so no pid means another process."""
        for pid in self._pids().values():
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
        self._wait_for_ranks(_REAP_S)
        clear_progress()

    def _wait_for_ranks(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        deadline = time.monotonic() + seconds
        while None in self._exits().values() and time.monotonic() < deadline and not until():
            time.sleep(_POLL_S)


def _exit_code(pid: int) -> int | None:
    """As `Popen.returncode` has it, but the process stays a zombie for whoever reaps it."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return 0  # reaped by elastic, which happens only after all of them ended
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

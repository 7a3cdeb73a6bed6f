"""Ranks that may die alone: the others go on without them, and each is started again by itself."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState

from meshwright.launch.failure import Failure, first_cause, is_consequence, record_file, repeats
from meshwright.launch.local.agent import _POLL_S, _SETTLE_S, Agent, _exit_code
from meshwright.launch.output import tell
from meshwright.launch.place import place_file, read_place
from meshwright.launch.signals import StopRequest

_LEAVE_S = 3.0  # how long ranks may take to exit when those that last have finished


class ReplacingAgent(Agent):
    """The first `expendable` ranks may die; when one of the others does, all start again, as with any agent. All
    restarts together, of single ranks and of all, are as many as the spec allows."""

    def __init__(self, spec: WorkerSpec, folder: Path, grace_s: float, stop: StopRequest, expendable: int) -> None:
        super().__init__(spec, folder, grace_s, stop)
        self._expendable = expendable
        self._replaced = 0
        self._replacements: dict[int, subprocess.Popen[bytes]] = {}
        self._lost: set[int] = set()
        self._failures: dict[int, Failure] = {}  # the last one of each rank

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._reap()
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.requested:
            self._stop_ranks()
        exits = self._exits()
        lasting = {rank: code for rank, code in exits.items() if rank >= self._expendable}
        if not any(lasting.values()) and None not in lasting.values():
            self._wait_for_ranks(_LEAVE_S)
            self._kill_ranks()
            self._reap()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(exits))
        if any(lasting.values()):
            return self._all_failed(worker_group)
        for rank, code in exits.items():
            if code and rank not in self._lost:
                failure = self._settled(rank)
                if failure is None or not self._survives(failure):
                    return self._all_failed(worker_group)
                self._lose(failure)
        if len(self._lost) == self._expendable:
            return self._all_failed(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _all_failed(self, worker_group: WorkerGroup) -> RunResult:
        if self.restarts + self._replaced >= worker_group.spec.max_restarts:
            self._remaining_restarts = 0
        return super()._monitor_workers(worker_group)

    def _settled(self, rank: int) -> Failure | None:
        """Why this rank is gone. One that tells of another waits for that to show: then this is None."""
        deadline = time.monotonic() + _SETTLE_S
        while True:
            exits = self._exits()
            if any(code for other, code in exits.items() if other >= self._expendable):
                return None
            failure = first_cause(self._folder, self.restarts, {rank: exits[rank] or 0})
            if failure is None or not is_consequence(failure) or time.monotonic() > deadline:
                return failure
            time.sleep(_POLL_S)

    def _survives(self, failure: Failure) -> bool:
        """Whether the others can do without it. One that never took part would be waited for in vain."""
        if failure.final:
            return False
        seen = read_place(place_file(self._folder, failure.rank))
        took_part = failure.rank in self._replacements or (seen is not None and seen.completed > 0)
        return took_part or self._may_replace()

    def _may_replace(self) -> bool:
        return self.restarts + self._replaced < self._worker_group.spec.max_restarts

    def _lose(self, failure: Failure) -> None:
        rank, most = failure.rank, self._worker_group.spec.max_restarts
        before, self._failures[rank] = self._failures.get(rank), failure
        with suppress(ProcessLookupError, PermissionError):  # what it had started
            os.killpg(self._pids()[rank], signal.SIGKILL)
        if not self._may_replace() or repeats(failure, before):
            self._lost.add(rank)
            tell(f"{failure.line}: the others go on without it")
            return
        self._replaced += 1
        tell(f"{failure.line}: it starts again alone ({self.restarts + self._replaced} of at most {most} times)")
        record_file(self._folder, rank).unlink(missing_ok=True)
        if rank in self._replacements:
            self._replacements[rank].wait()
        self._replacements[rank] = self._started(rank)

    def _started(self, rank: int) -> "subprocess.Popen[bytes]":
        """As elastic starts it: what a rank is told, and a process group of its own."""
        spec, group = self._worker_group.spec, self._worker_group
        told = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(spec.local_world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
        }
        words = [str(word).replace("$$", "$") for word in spec.args]
        return subprocess.Popen([sys.executable, *words], env={**os.environ, **told}, start_new_session=True)

    def _cause(self, exits: dict[int, int | None]) -> Failure | None:
        """Those that were lost before explain nothing, unless nobody else is left to."""
        now = {rank: code for rank, code in exits.items() if rank not in self._lost}
        return super()._cause(now) or super()._cause(exits)

    def _pids(self) -> dict[int, int]:
        return {**super()._pids(), **{rank: process.pid for rank, process in self._replacements.items()}}

    def _exits(self) -> dict[int, int | None]:
        found = {rank: _exit_code(pid) for rank, pid in super()._pids().items()}
        for rank, process in self._replacements.items():
            found[rank] = _exit_code(process.pid) if process.returncode is None else process.returncode
        return found

    def _reap(self) -> None:
        """Forgets what was started beside elastic, when all of it was killed."""
        for process in self._replacements.values():
            process.wait()
        self._replacements.clear()
        self._lost.clear()

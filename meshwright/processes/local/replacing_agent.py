"""`ReplacingAgent`: an agent whose first ranks are expendable. When one of them dies, it alone is started again, and
the other ranks go on.

`agent.py` lists the private members of torch's agent that are also used here.
"""

import os
import time
from pathlib import Path
from signal import SIGKILL

import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState

from meshwright.processes.failure import Failure, delete_record, first_cause, is_consequence, repeats
from meshwright.processes.heartbeat import heartbeat_file, read_heartbeat
from meshwright.processes.local.agent import POLL_S, SETTLE_S, Agent
from meshwright.processes.local.fork_server import ForkedRank, ForkServer
from meshwright.processes.output import print_to_user
from meshwright.processes.signals import StopRequest

_LEAVE_S = 3.0  # how long expendable ranks may take to exit when all others have finished


class ReplacingAgent(Agent):
    """An `Agent` whose first `expendable` ranks may die. When any other rank dies, all ranks are started again. The
    spec's limit of restarts is for restarts of single ranks and of all ranks together."""

    def __init__(
        self,
        spec: WorkerSpec,
        server: ForkServer,
        store: dist.Store,
        folder: Path,
        grace_s: float,
        stop: StopRequest,
        expendable: int,
    ) -> None:
        super().__init__(spec, server, store, folder, grace_s, stop)
        self._expendable = expendable
        self._replacement_count = 0
        self._replacements: dict[int, ForkedRank] = {}
        self._abandoned: set[int] = set()
        self._failures: dict[int, Failure] = {}  # the last failure of each rank

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        self._reap()
        super()._restart_workers(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._stop.requested:
            self._stop_ranks()
        exits = self._exits()
        essential = {rank: code for rank, code in exits.items() if rank >= self._expendable}
        if not any(essential.values()) and None not in essential.values():
            self._wait_for_ranks(_LEAVE_S)
            self._kill_ranks()
            self._reap()
            return RunResult(state=WorkerState.SUCCEEDED, return_values=dict.fromkeys(exits))
        if any(essential.values()):
            return self._restart_or_fail_all(worker_group)
        for rank, code in exits.items():
            if code and rank not in self._abandoned:
                failure = self._find_rank_cause(rank)
                if failure is None or not self._can_go_on_without(failure):
                    return self._restart_or_fail_all(worker_group)
                self._replace_or_abandon(failure)
        if len(self._abandoned) == self._expendable:
            return self._restart_or_fail_all(worker_group)
        return RunResult(state=WorkerState.HEALTHY)

    def _restart_or_fail_all(self, worker_group: WorkerGroup) -> RunResult:
        if not self._may_restart():
            self._remaining_restarts = 0
        return super()._monitor_workers(worker_group)

    def _find_rank_cause(self, rank: int) -> Failure | None:
        """Returns the failure of this rank; None if a rank that is not expendable has failed. If the failure looks like
        a consequence of another one, it waits a moment for that one."""
        deadline = time.monotonic() + SETTLE_S
        while True:
            exits = self._exits()
            if any(code for other, code in exits.items() if other >= self._expendable):
                return None
            failure = first_cause(self._records, self._folder, self.restarts, {rank: exits[rank] or 0})
            if failure is None or not is_consequence(failure) or time.monotonic() > deadline:
                return failure
            time.sleep(POLL_S)

    def _can_go_on_without(self, failure: Failure) -> bool:
        """Whether the other ranks can go on. They can if the rank completed a step before or can be started again. For
        a rank that never took part in a step they would wait forever."""
        if failure.final:
            return False
        heartbeat = read_heartbeat(heartbeat_file(self._folder, failure.rank))
        took_part = failure.rank in self._replacements or (heartbeat is not None and heartbeat.completed > 0)
        return took_part or self._may_restart()

    def _restarts_used(self) -> int:
        return super()._restarts_used() + self._replacement_count

    def _replace_or_abandon(self, failure: Failure) -> None:
        rank = failure.rank
        previous, self._failures[rank] = self._failures.get(rank), failure
        self._processes()[rank].signal_group(SIGKILL)  # the processes that the rank had started
        if not self._may_restart() or repeats(failure, previous):
            self._abandoned.add(rank)
            print_to_user(f"{failure.line}: the others go on without it")
            return
        self._replacement_count += 1
        used = self._restarts_used()
        print_to_user(f"{failure.line}: it starts again alone ({used} of at most {self._max_restarts} times)")
        delete_record(self._records, rank, self.restarts)
        if rank in self._replacements:
            self._replacements[rank].wait()
        self._replacements[rank] = self._start_replacement(rank)

    def _start_replacement(self, rank: int) -> ForkedRank:
        """Starts the rank as elastic does: with the same environment variables and in a process group of its own."""
        spec, group = self._worker_group.spec, self._worker_group
        variables = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(spec.local_world_size),
            "LOCAL_WORLD_SIZE": str(spec.local_world_size),
            "MASTER_ADDR": str(group.master_addr),
            "MASTER_PORT": str(group.master_port),
            "TORCHELASTIC_RESTART_COUNT": str(self.restarts),
        }
        arguments = [str(argument).replace("$$", "$") for argument in spec.args]
        return self._start_rank(arguments, {**os.environ, **variables})

    def _cause(self, exits: dict[int, int | None]) -> Failure | None:
        """Returns the first cause. Ranks that were abandoned before are ignored, unless no other rank has failed."""
        others = {rank: code for rank, code in exits.items() if rank not in self._abandoned}
        return super()._cause(others) or super()._cause(exits)

    def _processes(self) -> dict[int, ForkedRank]:
        return {**super()._processes(), **self._replacements}

    def _reap(self) -> None:
        """Waits for the replacement processes, which elastic does not know, after all of them were killed."""
        for process in self._replacements.values():
            process.wait()
        self._replacements.clear()
        self._abandoned.clear()

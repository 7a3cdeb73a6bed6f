"""`NodeAgent`: starts the ranks of one of several machines and watches them. It is `Agent` with a rendezvous of several
machines; `local/agent.py` lists the private members of torch's agent that are used."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from meshwright.processes.environment import SESSION
from meshwright.processes.failure import Failure, is_consequence, read_record
from meshwright.processes.local.agent import POLL_S, Agent
from meshwright.processes.local.fork_server import ForkedRank, ForkServer
from meshwright.processes.nodes.rendezvous import NodeRendezvous
from meshwright.processes.output import print_to_user
from meshwright.processes.signals import StopRequest
from meshwright.processes.token.machines import MachinesStore
from meshwright.processes.token.signed_store import StrangerError
from meshwright.processes.torch_private import elastic_processes_of

_NO_FOLDER = Path("/dev/null/no folder")  # rank 0 chooses the folder of heartbeats, which this process does not know
_LEAVE_S = 60.0  # how long machine 0 waits for the others when its own ranks have ended


class NodeAgent(Agent):
    """An agent whose ranks are some of the ranks of a run. The rank's attempt is the round of the rendezvous, which is
    the same on all machines, also on one that was started again."""

    def __init__(
        self,
        spec: WorkerSpec,
        server: ForkServer,
        store: MachinesStore,
        grace_s: float,
        stop: StopRequest,
        rendezvous: NodeRendezvous,
    ) -> None:
        super().__init__(spec, server, store, _NO_FOLDER, grace_s, stop)
        self._rendezvous_handler = rendezvous
        self._machines = store
        self._round = 0
        self._has_failed = False
        self._result: dict[str, Any] | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._round = self._rendezvous_handler.round
        return super()._start_workers(worker_group)

    def _start_rank(self, arguments: Sequence[str], environment: Mapping[str, str]) -> ForkedRank:
        return super()._start_rank(
            arguments, {**environment, "TORCHELASTIC_RESTART_COUNT": str(self._round), SESSION: self._machines.session}
        )

    @property
    def _attempt(self) -> int:
        return self._round

    def _processes(self) -> dict[int, ForkedRank]:
        processes = elastic_processes_of(self._pcontext)
        ranks = {worker.local_rank: worker.global_rank for worker in self._worker_group.workers}
        return {ranks[local_rank]: process for local_rank, process in processes.items() if local_rank in ranks}

    def _cause(self, exits: dict[int, int | None]) -> Failure | None:
        """Returns the first cause, also if a rank of another machine has recorded it."""
        cause = super()._cause(exits)
        if cause is None or not is_consequence(cause):
            return cause
        size = self._worker_group.workers[0].world_size
        records = (read_record(self._records, rank, self._round) for rank in range(size) if rank not in exits)
        return next((record for record in records if record is not None and not is_consequence(record)), cause)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        self._has_failed = result.state in (WorkerState.FAILED, WorkerState.UNHEALTHY)
        if result.state == WorkerState.SUCCEEDED and self.result() is None and self._others_wait():
            # Another agent has seen first that a machine wants to join, and has stopped its ranks, and so these.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _others_wait(self) -> bool:
        return self._rendezvous_handler.num_nodes_waiting() > 0

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if self._has_failed:
            super()._restart_workers(worker_group)
            return
        print_to_user("a machine joins: the ranks save, and all start again")
        self._end_ranks()
        self._kill_ranks()
        LocalElasticAgent._restart_workers(self, worker_group)

    def _stop_ranks(self) -> None:
        try:
            super()._stop_ranks()
        finally:
            self._exit_barrier()

    def _exit_barrier(self) -> None:
        """Tells machine 0 that the ranks here have ended. Machine 0 waits for all others, because it has the store. The
        others first wait for the result, which rank 0 may write after their ranks have ended."""
        group = self._worker_group
        try:
            if self._rendezvous_handler.node.rank:
                self._wait_for_result()
            self._machines.write(f"end of node {group.group_rank} in attempt {self._round}", "1")
            if self._rendezvous_handler.node.rank:
                return
            keys = [f"end of node {number} in attempt {self._round}" for number in range(group.group_world_size or 1)]
            deadline = time.monotonic() + _LEAVE_S
            while not self._records.check(keys) and time.monotonic() < deadline and not self._stop.insisted:
                time.sleep(POLL_S)
        except RuntimeError:
            return  # the store has ended with machine 0

    def _wait_for_result(self) -> None:
        """Waits until rank 0 has written the result, or the ranks of its machine have ended without one."""
        key = f"end of node 0 in attempt {self._round}"
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline and not self._stop.insisted:
            has_ended = self._records.check([key])  # read first: the result is written before
            self._result = self.result()
            if self._result is not None or has_ended:
                return
            time.sleep(POLL_S)

    def kill_ranks(self) -> None:
        """Kills the ranks of this machine, which cannot go on without another one."""
        self._kill_ranks()

    def result(self) -> dict[str, Any] | None:
        """Returns the result that rank 0 has written to the store; None if the run has not finished."""
        if self._result is not None:
            return self._result
        key = result_key(self._round)
        if not self._machines.check([key]):
            return None
        try:
            result: dict[str, Any] | None = json.loads(self._machines.read(key))
        except StrangerError as error:
            print_to_user(f"refused: {error}")
            return None
        return result


def result_key(attempt: int) -> str:
    return f"result of attempt {attempt}"

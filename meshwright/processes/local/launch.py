"""Starts ranks on this machine, restarts them when one dies, and says in one line why they failed."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from types import MappingProxyType

from torch.distributed.elastic.agent.server.api import WorkerSpec

from meshwright.errors import RankError, Stopped
from meshwright.files.storage import writing
from meshwright.processes import environment as variables
from meshwright.processes import loopback
from meshwright.processes.failure import to_error
from meshwright.processes.heartbeat import heartbeat_file
from meshwright.processes.local.agent import Agent, SingleMachineRendezvous
from meshwright.processes.local.fork_server import fork_server
from meshwright.processes.local.replacing_agent import ReplacingAgent
from meshwright.processes.signals import StopRequest


@dataclass(frozen=True)
class RankSettings:
    """How ranks are started. `count` is their number, and `threads` the number of threads of each. `restarts` is the
    number of restarts allowed. `grace_s` is how long ranks may take to save and exit after a stop request. When one of
    the first `expendable` ranks dies, it alone is started again, and the other ranks go on. `speaker` is the rank that
    prints to the terminal. With `spare`, a process that has imported what ranks need waits to start them again."""

    count: int
    device: str
    threads: int
    restarts: int
    grace_s: float = 30.0
    expendable: int = 0
    speaker: int = 0
    spare: bool = True


def launch(
    module: str,
    arguments: Sequence[str],
    ranks: RankSettings,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Calls `main()` of the module in every rank, with `arguments` in `sys.argv`, until all have finished. Returns the
    number of restarts.

    Raises RankError, StorageError or InputError when ranks failed for good, and Stopped when a signal stopped them.
    Rank logs go to `folder`. It must be called from the main thread, because the kernel kills ranks when the thread
    that started them ends.
    """
    folder = folder.absolute()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for rank in range(ranks.count):
            heartbeat_file(folder, rank).unlink(missing_ok=True)
    store, port = loopback.serve_store()
    with (
        StopRequest((SIGTERM, SIGINT, SIGHUP)) as stop,
        quiet_elastic(),
        variables.environment_variables({**_rank_variables(ranks, folder), **environment}),
        fork_server(module, ranks.spare) as server,
    ):
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks.count,
            rdzv_handler=SingleMachineRendezvous(port),
            entrypoint=module,
            # Elastic would substitute `${local_rank}` in arguments. `$$` keeps a `$` as it is.
            args=tuple(word.replace("$", "$$") for word in arguments),
            max_restarts=ranks.restarts,
        )
        agent = (
            ReplacingAgent(spec, server, store, folder, ranks.grace_s, stop, ranks.expendable)
            if ranks.expendable
            else Agent(spec, server, store, folder, ranks.grace_s, stop)
        )
        result = agent.run()
    del store  # the ranks needed it until here
    if result.is_failed():
        raise to_error(agent.failure, folder) if agent.failure else RankError("a rank failed")
    if stop.received is not None:
        raise Stopped(f"stopped by {stop.received.name}")
    return agent.restarts


def _rank_variables(ranks: RankSettings, folder: Path) -> dict[str, str]:
    interface = loopback.interface()
    return {
        variables.FOLDER: str(folder),
        variables.SPEAKER: str(ranks.speaker),
        # Set before torch is imported, because it sizes its thread pools only once.
        "OMP_NUM_THREADS": str(ranks.threads),
        "MKL_NUM_THREADS": str(ranks.threads),
        # Local ranks need no other machine, and must not be reachable from one.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # Elastic installs no signal handlers: they would raise at any point of the agent and lose track of ranks.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",
    }


@contextmanager
def quiet_elastic() -> Iterator[None]:
    """Hides the failure reports of elastic's logger, because meshwright prints its own."""
    logger = logging.getLogger("torch.distributed.elastic")
    propagated, silent = logger.propagate, logging.NullHandler()
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = propagated
        logger.removeHandler(silent)

"""Starts ranks on this machine, restarts them when one dies, and tells in one line why they failed."""

import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGTERM
from types import MappingProxyType

from torch.distributed.elastic.agent.server.api import WorkerSpec

from meshwright.errors import RankError, Stopped
from meshwright.launch import environment as variables
from meshwright.launch import loopback
from meshwright.launch.failure import record_file, to_error
from meshwright.launch.local.agent import Agent, OneMachine
from meshwright.launch.local.replacing_agent import ReplacingAgent
from meshwright.launch.place import place_file
from meshwright.launch.signals import StopRequest


@dataclass(frozen=True)
class Ranks:
    """`threads` per rank; `grace_s` is how long ranks may take to save and exit when asked to stop. The first
    `expendable` ranks may die alone: the others go on, and each is started again by itself. `speaker`: the rank whose
    words a person sees."""

    count: int
    device: str
    threads: int
    restarts: int
    grace_s: float = 30.0
    expendable: int = 0
    speaker: int = 0


def launch(
    module: str,
    arguments: Sequence[str],
    ranks: Ranks,
    folder: Path,
    environment: Mapping[str, str] = MappingProxyType({}),
) -> int:
    """Runs `python -m module arguments` in every rank until all have finished; returns how many restarts.

    Raises RankError or InputError when ranks failed for good, Stopped when a signal asked for it. Rank logs
    go to `folder`. To be called from the main thread: ranks live as long as the thread that started them.
    """
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks.count):
        place_file(folder, rank).unlink(missing_ok=True)
        record_file(folder, rank).unlink(missing_ok=True)
    store, port = loopback.serve_store()
    with (
        StopRequest((SIGTERM, SIGINT, SIGHUP)) as stop,
        _quiet_elastic(),
        variables.changed({**_for_ranks(ranks, folder), **environment}),
    ):
        spec = WorkerSpec(
            role="rank",
            local_world_size=ranks.count,
            rdzv_handler=OneMachine(port),
            entrypoint=sys.executable,
            # Elastic substitutes `${local_rank}` in arguments, which are not templates for us.
            args=tuple(word.replace("$", "$$") for word in ("-m", "meshwright.launch.local.start", module, *arguments)),
            max_restarts=ranks.restarts,
        )
        agent = (
            ReplacingAgent(spec, folder, ranks.grace_s, stop, ranks.expendable)
            if ranks.expendable
            else Agent(spec, folder, ranks.grace_s, stop)
        )
        result = agent.run()
    del store  # it served until here
    if result.is_failed():
        raise to_error(agent.failure, folder) if agent.failure else RankError("a rank failed")
    if stop.received is not None:
        raise Stopped(f"stopped by {stop.received.name}")
    return agent.restarts


def _for_ranks(ranks: Ranks, folder: Path) -> dict[str, str]:
    interface = loopback.interface()
    return {
        variables.FOLDER: str(folder),
        variables.AGENT: str(os.getpid()),
        variables.SPEAKER: str(ranks.speaker),
        # Before torch is imported: it sizes its thread pools once.
        "OMP_NUM_THREADS": str(ranks.threads),
        "MKL_NUM_THREADS": str(ranks.threads),
        # Local ranks need no other machine, and must not be reachable from one.
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        # No signal of elastic's own: its handlers raise in the middle of anything, and would lose ranks.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "none",
    }


@contextmanager
def _quiet_elastic() -> Iterator[None]:
    """Keeps elastic's own account of failures from the user, who gets ours."""
    logger = logging.getLogger("torch.distributed.elastic")
    before, silent = logger.propagate, logging.NullHandler()
    logger.addHandler(silent)
    logger.propagate = False
    try:
        yield
    finally:
        logger.propagate = before
        logger.removeHandler(silent)

"""Reads a process's rank from the environment variables of its launcher. Meshwright's own variables are named here."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from meshwright.processes.launchers.launched_rank import LaunchedRank
from meshwright.processes.launchers.store_place import StorePlace, find_store_place
from meshwright.processes.launchers.table import read_launched_rank
from meshwright.processes.launchers.torch_variables import OWN_RANK, check_no_torchrun_is_missing

FOLDER = "MESHWRIGHT_FOLDER"  # the folder of the rank's log and heartbeat
SPEAKER = "MESHWRIGHT_SPEAKER"  # the rank that prints to the terminal
SESSION = "MESHWRIGHT_SESSION"  # what the launchers of several machines (`train --nodes`) have agreed on
RESTART = "MESHWRIGHT_RESTART"  # when the failure was noticed after which this rank is started, and when it is started
FORK_SERVER_PID = OWN_RANK  # the id of the process that forked this rank


@dataclass(frozen=True)
class Environment:
    """A rank as its launcher's environment variables describe it. A process that no launcher started is rank 0 of 1.
    `attempt` is how often the ranks were restarted before. `fork_server_pid` is the id of the fork server that forked
    the rank, or None if another launcher than meshwright's started it. `speaker` is the rank that prints to the
    terminal. `launcher` is the launcher's name in messages."""

    launched: bool
    rank: int
    local_rank: int
    size: int
    local_size: int
    attempt: int
    fork_server_pid: int | None
    folder: Path | None
    speaker: int = 0
    launcher: str = ""


def read_environment() -> Environment:
    """Reads the variables of the first launcher in the table (launchers/table.py) that has set any."""
    variables = os.environ
    rank = read_launched_rank(variables)
    if rank is None:
        return Environment(False, 0, 0, 1, 1, 0, None, None)
    return Environment(
        launched=True,
        rank=rank.rank,
        local_rank=rank.local_rank,
        size=rank.size,
        local_size=rank.local_size,
        attempt=rank.attempt,
        fork_server_pid=int(variables[FORK_SERVER_PID]) if FORK_SERVER_PID in variables else None,
        folder=Path(variables[FOLDER]) if FOLDER in variables else None,
        speaker=int(variables.get(SPEAKER, 0)),
        launcher=rank.launcher,
    )


@dataclass(frozen=True)
class RestartTimes:
    """When the launcher noticed a failure, and when it started this rank again, both as `time.time` returns them."""

    noticed: float
    started: float


def restart_times() -> RestartTimes | None:
    """Returns when meshwright's launcher has started this rank again; None if that was not after a failure."""
    text = os.environ.get(RESTART)
    return None if text is None else RestartTimes(*map(float, text.split()))


def fork_server_pid() -> int | None:
    """Returns the id of the process that forked this rank; None if another launcher than meshwright's started it."""
    return int(os.environ[FORK_SERVER_PID]) if FORK_SERVER_PID in os.environ else None


def launched_rank() -> LaunchedRank | None:
    """Returns this process as its launcher describes it; None if no launcher started it as one of several ranks."""
    return read_launched_rank(os.environ)


def store_of(rank: LaunchedRank) -> StorePlace:
    """Returns where the store of this rank's launcher is."""
    return find_store_place(rank, os.environ)


def check_can_be_alone() -> None:
    """Raises an error if this process is no rank, and variables say that torchrun should have started it as one."""
    check_no_torchrun_is_missing(os.environ)


def is_on_several_machines() -> bool:
    """Whether this rank of meshwright's launcher is one of a run on several machines (`train --nodes`)."""
    return SESSION in os.environ


def store_address() -> tuple[str, int]:
    """Returns the address of the store that meshwright's launcher serves."""
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def variables_of(*beginnings: str) -> dict[str, str]:
    """Returns the environment variables of a library, whose names begin with one of these, for the library's room."""
    return {name: value for name, value in os.environ.items() if name.startswith(beginnings)}


def variables_with(**changes: str) -> dict[str, str]:
    """Returns all environment variables with these changes, for a process that is started."""
    return {**os.environ, **changes}


def python_path_with(folder: Path) -> str:
    """Returns the value of PYTHONPATH that makes Python find this folder's packages, too."""
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))


@contextmanager
def environment_variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables within the context, for processes that are started there, and restores the old values after it."""
    previous = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in previous.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

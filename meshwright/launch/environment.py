"""Reads a process's rank from the environment variables of its launcher. Meshwright's own variables are named here."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESHWRIGHT_FOLDER"  # the folder of the rank's log and heartbeat
SPEAKER = "MESHWRIGHT_SPEAKER"  # the rank that prints to the terminal
FORK_SERVER_PID = "MESHWRIGHT_FORK_SERVER"  # the id of the process that forked this rank


@dataclass(frozen=True)
class Environment:
    """A rank as its launcher's environment variables describe it. A process that no launcher started is rank 0 of 1.
    `attempt` is how often the ranks were restarted before. `fork_server_pid` is the id of the fork server that forked
    the rank, or None if another launcher than meshwright's started it. `speaker` is the rank that prints to the
    terminal."""

    launched: bool
    rank: int
    local_rank: int
    size: int
    local_size: int
    attempt: int
    fork_server_pid: int | None
    folder: Path | None
    speaker: int = 0


def read_environment() -> Environment:
    variables = os.environ
    launched = "RANK" in variables and "WORLD_SIZE" in variables
    if not launched:
        return Environment(False, 0, 0, 1, 1, 0, None, None)
    rank, size = int(variables["RANK"]), int(variables["WORLD_SIZE"])
    return Environment(
        launched=True,
        rank=rank,
        local_rank=int(variables.get("LOCAL_RANK", rank)),
        size=size,
        local_size=int(variables.get("LOCAL_WORLD_SIZE", size)),
        attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT", 0)),
        fork_server_pid=int(variables[FORK_SERVER_PID]) if FORK_SERVER_PID in variables else None,
        folder=Path(variables[FOLDER]) if FOLDER in variables else None,
        speaker=int(variables.get(SPEAKER, 0)),
    )


def store_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


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

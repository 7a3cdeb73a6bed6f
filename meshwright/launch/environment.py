"""What the environment tells a process about its rank. Our own variables are named here."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = "MESHWRIGHT_FOLDER"  # where the rank's log, place and failure record go
SPEAKER = "MESHWRIGHT_SPEAKER"  # the rank whose words a person sees
AGENT = "MESHWRIGHT_AGENT"  # the process that started the ranks and serves their store


@dataclass(frozen=True)
class Environment:
    """A rank as its launcher described it; alone it is rank 0 of 1."""

    launched: bool
    rank: int
    local_rank: int
    size: int
    local_size: int
    attempt: int
    agent: int | None
    folder: Path | None
    speaker: int = 0


def read() -> Environment:
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
        agent=int(variables[AGENT]) if AGENT in variables else None,
        folder=Path(variables[FOLDER]) if FOLDER in variables else None,
        speaker=int(variables.get(SPEAKER, 0)),
    )


def store_address() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


@contextmanager
def changed(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes started meanwhile, and puts the old values back."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

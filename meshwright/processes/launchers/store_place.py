"""Where the ranks of a launch find their store: at MASTER_ADDR and MASTER_PORT if they are set; at the first host of a
Slurm step and a port that its ids give; or, on one machine, at a port of the loopback address, which rank 0 writes to a
file that is named after the launch."""

import hashlib
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from meshwright.errors import InputError
from meshwright.processes.launchers.launched_rank import LaunchedRank, Variables, number
from meshwright.processes.launchers.torch_variables import MASTER_ADDRESS, MASTER_PORT

_LAST_PORT = 65535


@dataclass(frozen=True)
class StorePlace:
    """The address of the store, or the file that will have its port. `is_served` is true if the launcher serves the
    store; otherwise rank 0 does."""

    host: str = ""
    port: int = 0
    file: Path | None = None
    is_served: bool = False


def find_store_place(rank: LaunchedRank, variables: Variables) -> StorePlace:
    host = variables.get(MASTER_ADDRESS) or rank.host
    port = _port(variables) or rank.port
    is_served = variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and rank.rank_variable == "RANK"
    if host and port:
        return StorePlace(host, port, is_served=is_served)
    if MASTER_ADDRESS in variables or MASTER_PORT in variables:
        present, missing = (MASTER_ADDRESS, MASTER_PORT) if host else (MASTER_PORT, MASTER_ADDRESS)
        if not (rank.is_on_one_machine and rank.port):  # on one machine, Slurm's variables suffice
            raise InputError(f"{present}={variables[present]} is set, but {missing} is not: set both or neither")
    if rank.is_on_one_machine:
        return StorePlace(file=_port_file(rank))
    raise InputError(
        f"{rank.launcher} started {rank.size} ranks, {rank.local_size} of them on this machine, and says nowhere how"
        f" ranks on other machines are reached: set {MASTER_ADDRESS} to the host of rank 0 and {MASTER_PORT} to a free"
        f" port there on all of them, such as mpirun -x {MASTER_ADDRESS}=node1 -x {MASTER_PORT}=29500 (OpenMPI) or"
        f" mpirun -genv {MASTER_ADDRESS} node1 -genv {MASTER_PORT} 29500 (MPICH, Intel MPI)"
    )


def _port(variables: Variables) -> int | None:
    if not variables.get(MASTER_PORT):
        return None
    port = number(variables, MASTER_PORT)
    if not 0 < port <= _LAST_PORT:
        raise InputError(f"{MASTER_PORT}={port}: a port is a number from 1 to {_LAST_PORT}")
    return port


def _port_file(rank: LaunchedRank) -> Path:
    launch = f"{rank.launcher} {rank.job or _launching_process(rank.rank_variable)} {rank.attempt}"
    name = hashlib.sha256(launch.encode()).hexdigest()[:16]
    return private_folder() / f"port-{name}"


def private_folder() -> Path:
    """Returns a folder in the folder of temporary files that only this user can write to."""
    folder = Path(tempfile.gettempdir(), f"meshwright-{os.geteuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if folder.is_symlink() or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise InputError(
            f"{folder} is not a private folder of this user, so ranks cannot find each other there: remove it, or set"
            f" {MASTER_ADDRESS} and {MASTER_PORT}"
        )
    return folder


def _launching_process(rank_variable: str) -> str:
    """Returns the id and the start time of the process that has started the ranks of this machine: the closest ancestor
    without the variable that gives each rank its number. Shells and scripts in between have it."""
    process = os.getppid()
    while process > 1:
        try:
            names = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
        except OSError:  # a process of another user, such as the system
            break
        if not any(name.startswith(f"{rank_variable}=".encode()) for name in names):
            break
        process, _ = _parent_and_start(process)
    _, start = _parent_and_start(process)
    return f"{process} {start}"


def _parent_and_start(process: int) -> tuple[int, str]:
    """The parent and the start time of a process; 0 and an empty text if the process is not known."""
    try:
        from_state_on = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0, ""
    return int(from_state_on[1]), from_state_on[19]

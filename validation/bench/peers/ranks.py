"""Runs a peer's script in ranks on this machine, with any Python interpreter. The ranks get the environment variables
that torchrun would set. Their store is ours, because torchrun's would listen on every interface."""

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.errors import MeshwrightError
from meshwright.processes import environment, loopback

PREFIX = "meshwright-peer "  # begins the line with a rank's result, among what the library prints
_POLL_S = 0.05
_PACKAGE_FOLDER = Path(__file__).parents[3]  # in which `import meshwright` finds this package


@dataclass(frozen=True)
class RankCommand:
    """A script of this package and its arguments. `threads` is the number of cores that each rank computes on."""

    python: Path
    module: str
    arguments: Sequence[str]
    ranks: int
    threads: int
    time_limit_s: float


def run_ranks(command: RankCommand) -> dict[str, Any]:
    """Returns the JSON object that rank 0 printed. If a rank fails, or the ranks are not done within the time limit,
    all of them are ended, and a `MeshwrightError` says in one line why."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="meshwright-peers-")))
        store, port = loopback.serve_store()
        processes = []
        for rank in range(command.ranks):
            process = _start(command, rank, port, folder)
            processes.append(process)
            stack.callback(_end, process)
        failed = _wait(processes, command.time_limit_s)
        del store
        if failed is not None:
            raise MeshwrightError(_reason((folder / f"{failed}.err").read_text(errors="replace")))
        return _result((folder / "0.out").read_text(errors="replace"))


def _start(command: RankCommand, rank: int, port: int, folder: Path) -> "subprocess.Popen[bytes]":
    variables = _variables(command, rank, port)
    words = [str(command.python), "-m", command.module, *command.arguments]
    with (
        environment.environment_variables(variables),
        (folder / f"{rank}.out").open("wb") as output,
        (folder / f"{rank}.err").open("wb") as errors,
    ):
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, start_new_session=True)


def _variables(command: RankCommand, rank: int, port: int) -> dict[str, str]:
    size, interface = str(command.ranks), loopback.interface()
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "ROLE_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "ROLE_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": loopback.ADDRESS,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "meshwright-peers",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # rank 0 serves no store of its own
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
        "OMP_NUM_THREADS": str(command.threads),
        "MKL_NUM_THREADS": str(command.threads),
        "PYTHONPATH": environment.python_path_with(_PACKAGE_FOLDER),
    }


def _wait(processes: Sequence["subprocess.Popen[bytes]"], time_limit_s: float) -> int | None:
    """Waits for the processes. Returns the rank that failed first, or None if all of them ended well."""
    deadline = time.monotonic() + time_limit_s
    while True:
        codes = [process.poll() for process in processes]
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None or all(code == 0 for code in codes):
            return failed
        if time.monotonic() > deadline:
            raise MeshwrightError(
                f"not done after {time_limit_s:g} s: set train.timeout_s to a longer time, or --steps to fewer steps"
            )
        time.sleep(_POLL_S)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends a rank and the processes that it has started, such as compilers and loaders."""
    with suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason(errors: str) -> str:
    """Returns the line of a rank's error output that says why it failed: the last line that names an exception, or else
    the last line."""
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Exit", "Interrupt"))]
    return (named or lines or ["a rank ended without a message"])[-1]


def _result(output: str) -> dict[str, Any]:
    lines = [line for line in output.splitlines() if line.startswith(PREFIX)]
    if not lines:
        raise MeshwrightError("rank 0 ended without printing a result")
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(PREFIX))
    return result

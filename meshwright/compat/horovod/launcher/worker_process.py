"""`WorkerProcess`: the process of one rank, what it prints, and how it is ended."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import IO, Any

from meshwright.processes import loopback
from meshwright.processes.environment import python_path_with, variables_with
from meshwright.processes.local.rank_output import RankStream, Screen
from meshwright.processes.process_exit import exit_with_parent

_PACKAGE = Path(__file__).parents[4]  # the folder of the package meshwright
_IMPORT_PATH = Path(__file__).parents[1] / "import_path"  # has the package that scripts import as horovod
_GRACE_S = 5.0


class WorkerProcess:
    """A rank that runs. What it prints is shown with its number, or written to files in `folder`."""

    def __init__(
        self,
        command: Sequence[str],
        number: int,
        variables: Mapping[str, str],
        screen: Screen,
        folder: Path | None,
    ) -> None:
        self.number = number
        self._files: list[IO[bytes]] = []
        self.streams: list[RankStream] = []
        parent = os.getpid()
        output: list[Any] = []
        reads: list[int] = []
        if folder is not None:
            (folder / f"rank.{number}").mkdir(parents=True, exist_ok=True)
            self._files = [open(folder / f"rank.{number}" / name, "wb") for name in ("stdout", "stderr")]  # noqa: SIM115
            output = list(self._files)
        else:
            for _ in (1, 2):
                read_end, write_end = os.pipe()
                reads.append(read_end)
                output.append(write_end)
        self.process = subprocess.Popen(
            command,
            env=variables_with(**variables),
            stdin=subprocess.DEVNULL,
            stdout=output[0],
            stderr=output[1],
            start_new_session=True,
            preexec_fn=lambda: exit_with_parent(parent),
        )
        for position, read_end in enumerate(reads):
            os.close(output[position])
            self.streams.append(RankStream(number, position + 1, read_end, screen))

    def poll(self) -> int | None:
        return self.process.poll()

    def kill(self) -> None:
        """Ends the process and those that it has started: with SIGTERM, and after a while with SIGKILL."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_GRACE_S)
                if number == signal.SIGKILL:
                    return

    def close(self) -> None:
        for stream in self.streams:
            stream.close()
        self.streams = []
        for file in self._files:
            file.close()


def show_output(workers: Sequence[WorkerProcess], timeout_s: float, others: Sequence[Any] = ()) -> list[Any]:
    """Shows what workers print. Returns those of `others` that can be read, after at most `timeout_s`."""
    streams = [(worker, stream) for worker in workers for stream in worker.streams]
    sources: list[Any] = [*others, *(stream for _, stream in streams)]
    ready = wait(sources, timeout_s)
    for worker, stream in streams:
        if stream in ready and not stream.show():
            stream.close()
            worker.streams.remove(stream)
    return [other for other in others if other in ready]


def import_variables() -> dict[str, str]:
    """Returns the environment variables by which a script finds the packages horovod and meshwright."""
    return {"PYTHONPATH": os.pathsep.join((str(_IMPORT_PATH), python_path_with(_PACKAGE)))}


def shared_variables(store_port: int, ranks: int, threads: int) -> dict[str, str]:
    """Returns the environment variables of all ranks, which are on one machine and need no other one."""
    interface = loopback.interface()
    variables = {
        **import_variables(),
        "PYTHONUNBUFFERED": "1",
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": loopback.ADDRESS,
        "HOROVOD_GLOO_RENDEZVOUS_PORT": str(store_port),
        "HOROVOD_CONTROLLER": "gloo",
        "HOROVOD_CPU_OPERATIONS": "gloo",
        "HOROVOD_HOSTNAME": "localhost",
        "GLOO_SOCKET_IFNAME": interface,
        "NCCL_SOCKET_IFNAME": interface,
    }
    given = variables_with()
    return {**variables, **({} if "OMP_NUM_THREADS" in given else {"OMP_NUM_THREADS": str(threads)})}


def rank_variables(rank: int, size: int) -> dict[str, str]:
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
    values = (rank, size, rank, size, 0, 1)
    return {f"HOROVOD_{name}": str(value) for name, value in zip(names, values, strict=True)}

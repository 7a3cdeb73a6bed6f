"""Forks the processes of tests from one process that has imported torch and meshwright, because each import takes
seconds of a core. Ranks of tests, fork servers and commands are forked from it.

`start_command(["train", "job.yaml"])` runs `meshwright train job.yaml` as a process that has a process id, takes
signals, and starts its ranks as `python -m meshwright` does.
"""

import atexit
import ctypes
import importlib
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from meshwright.processes import environment
from meshwright.processes.failure import UNFINISHED
from meshwright.processes.local import fork_server
from meshwright.processes.local.fork_server import ForkedRank, ForkServer
from tests.forking.environment import AT_START, REPOSITORY

_RANK_0_OF_1 = {"RANK": "0", "WORLD_SIZE": "1"}  # a fork server starts ranks; the forked process removes these again
_IMPORTED = "tests.forking.imported"
# torch looks for GPUs without CUDA then, for example when it traces. After CUDA was used, no forked process can use it.
_WITHOUT_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_spawn = fork_server._spawn
_servers: list[ForkServer] = []


@cache
def _server(module: str) -> ForkServer:
    """A server that has imported the module. All are forked from the first one."""
    server = ForkServer(module, spawn_by_forking(module))
    atexit.register(server.close)
    _servers.append(server)
    return server


def server_ids() -> set[int]:
    """The processes of the servers, which stay until the tests end."""
    return {server._end.pid for server in _servers}


def fork(
    function: str,
    *arguments: str,
    stdin: int,
    stdout: int = 1,
    stderr: int = 2,
    variables: Mapping[str, str] = os.environ,
    folder: str | None = None,
    imported: str | None = None,
) -> ForkedRank:
    """Starts a process that calls `function`, written as `module:name`, with these arguments, environment variables,
    open files as standard streams, and working folder; None means this process's. The module `imported` is imported
    once for all processes that are started with it."""
    words = [folder or os.getcwd(), function, *arguments]
    variables = {**variables, **_RANK_0_OF_1}
    streams = {0: stdin, 1: stdout, 2: stderr}
    return _server(imported or _IMPORTED).start_rank("tests.forking.forked", words, variables, streams)


def main() -> None:
    """What a forked process does."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder, function, *arguments = sys.argv[1:]
    for name in (*_RANK_0_OF_1, environment.FORK_SERVER_PID):
        del os.environ[name]
    os.chdir(folder)
    sys.path[0] = folder
    tempfile.tempdir = None  # the variable TMPDIR may have changed
    try:
        _function(function)(*arguments)
    except SystemExit as end:
        if end.code:
            _exit(int(end.code))
    except BaseException:
        traceback.print_exc()
        _exit(1)


def _function(text: str) -> Callable[..., Any]:
    module, name = text.split(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _exit(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ---- fork servers


def spawn_by_forking(module: str) -> "fork_server._ServerEnd":
    """Stands for `fork_server._spawn`, which starts a Python process that imports torch."""
    if module == _IMPORTED:
        # torch reads the number of threads when it is imported. A test may have changed the working folder, and the
        # cache folder, in which C files are compiled.
        path, cache_folder = environment.python_path_with(REPOSITORY), AT_START["XDG_CACHE_HOME"]
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "XDG_CACHE_HOME": cache_folder, **_WITHOUT_CUDA}
        with environment.environment_variables(variables):
            return _spawn(module)
    if not module.startswith(("meshwright.", "tests.", "validation.")):
        return _spawn(module)
    ours, theirs = socket.socketpair()
    with theirs:
        process = fork("tests.forking.forked:serve", module, stdin=theirs.fileno())
    return fork_server._ServerEnd(process.pid, ours)


def serve(module: str) -> NoReturn:
    connection = socket.socket(fileno=take_standard_input())
    with suppress(BaseException), environment.environment_variables(_WITHOUT_CUDA):
        importlib.import_module(module)  # the rank that imports it again reports the error
    fork_server._serve(connection)


def take_standard_input() -> int:
    """Returns the open file that this process got as its standard input, which is empty from now on."""
    taken = os.dup(0)
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return taken


# ---- commands


class Process:
    """A forked process whose output is kept. It has the methods of `subprocess.Popen` that tests need."""

    def __init__(self, process: ForkedRank, stdout: Path, stderr: Path) -> None:
        self.pid = process.pid
        self._process = process
        self._stdout, self._stderr = stdout, stderr

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def poll(self) -> int | None:
        return self._process.poll()

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self) -> int:
        return self._process.wait()

    def wait_for_text(self, text: str, timeout: float = 100) -> None:
        """Waits until the process has printed the text to stderr."""
        deadline = time.monotonic() + timeout
        while text not in (printed := self._stderr.read_text()):
            assert self.poll() is None, printed
            assert time.monotonic() < deadline, printed
            time.sleep(0.05)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end, and returns what it printed to stdout and stderr."""
        self._process.wait(timeout)
        return self._stdout.read_text(), self._stderr.read_text()


@cache
def _outputs() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="meshwright-outputs-")


def start(function: str, *arguments: str) -> Process:
    """Starts a process that calls `function`, written as `module:name`, with these arguments. It can fork its own
    process, as one can that has not imported torch."""
    folder = Path(tempfile.mkdtemp(dir=_outputs().name))
    return _start(function, arguments, os.environ, folder / "stdout", folder / "stderr")


def _start(
    function: str, arguments: Sequence[str], variables: Mapping[str, str], stdout: Path, stderr: Path
) -> Process:
    with open(os.devnull) as nothing, stdout.open("w") as out, stderr.open("w") as err:
        process = fork(
            "tests.forking.forked:call",
            *(function, *arguments),
            stdin=nothing.fileno(),
            stdout=out.fileno(),
            stderr=err.fileno(),
            variables=variables,
        )
    return Process(process, stdout, stderr)


def start_command(words: Sequence[str]) -> Process:
    """Starts `meshwright` with these words."""
    return start("tests.forking.forked:run_command", *words)


def start_command_with(words: Sequence[str], variables: Mapping[str, str], stdout: Path, stderr: Path) -> Process:
    """Starts `meshwright` with these words and environment variables. Its output goes to these files."""
    return _start("tests.forking.forked:run_command", words, variables, stdout, stderr)


def call(function: str, *arguments: str) -> None:
    fork_server._can_fork = lambda: True  # this process has only imported torch
    _function(function)(*arguments)


def run_command(*words: str) -> None:
    sys.argv = ["meshwright", *words]
    importlib.import_module("meshwright.cli").main()


def run_module(module: str, *words: str) -> None:
    """Runs a module as `python -m` does."""
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def torchrun(*arguments: str) -> None:
    """Runs torchrun. Its ranks are forked from a copy of this process, made before torchrun has started threads."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
    from torch.distributed.run import main as run

    server = _TorchrunServer(_IMPORTED, fork_server._fork(_IMPORTED))

    def fork_rank(handler: Any, command: Sequence[str], variables: Mapping[str, str]) -> ForkedRank:
        words = [os.getcwd(), "tests.forking.forked:run_python", variables["RANK"], variables["WORLD_SIZE"]]
        words += [word for word in command[1:] if word != "-u"]
        files = {1: handler._stdout, 2: handler._stderr}
        streams = {0: 0, **{number: file.fileno() if file else number for number, file in files.items()}}
        return server.start_rank("tests.forking.forked", words, variables, streams)

    SubprocessHandler._popen = fork_rank  # type: ignore[method-assign, assignment]
    try:
        run(arguments)
    finally:
        server.close()


class _TorchrunServer(ForkServer):
    """Forks processes whose exit codes are those of programs, which may end themselves."""

    def exit_code(self, pid: int) -> int | None:
        code = super().exit_code(pid)
        return 0 if code == UNFINISHED else code


def run_python(rank: str, world_size: str, *words: str) -> NoReturn:
    """Does what `python WORDS` does in a rank of torchrun, and ends as it does, with the teardown of C++ libraries."""
    os.environ.update({"RANK": rank, "WORLD_SIZE": world_size})
    code = 0
    try:
        if words[0] == "-m":
            run_module(*words[1:])
        else:
            sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = int(end.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).exit(code)
    raise AssertionError("the process has ended")

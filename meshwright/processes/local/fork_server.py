"""The fork server: a process that has imported what ranks need, and forks the ranks.

Importing torch and meshwright takes seconds of a core. The fork server does it once; a rank is forked from it in
milliseconds, also after a restart. It starts no thread and runs no operation of torch, which makes forking it safe.
`launch` starts all ranks through a fork server: through that of a surrounding `preloaded`, or else through a new one.

Requests and answers are JSON on a pair of sockets. A request for a rank also passes the launcher's standard streams,
which may have changed since the server was started. The ranks are children of the server, so the launcher asks it for
their exit codes. The kernel kills the server when the launcher dies, and the ranks when the server dies.

A server that has imported the ranks' module is a spare: after a failure, ranks need no imports. `spare=False` makes a
server that has imported nothing of it (`train.spare: false`).
"""

import gc
import importlib
import json
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from signal import SIG_DFL, SIG_IGN, SIGINT, SIGKILL, SIGTERM, Signals, signal
from typing import Any, NoReturn

from meshwright.errors import RankError
from meshwright.processes import environment as variables
from meshwright.processes.failure import UNFINISHED
from meshwright.processes.process_exit import exit_with_parent
from meshwright.progress import phase

_POLL_S = 0.02
_STANDARD_STREAMS = (0, 1, 2)
_LENGTH = struct.Struct("<Q")


class ForkedRank:
    """A process that the fork server has forked. It has the methods of `subprocess.Popen` that are needed."""

    def __init__(self, pid: int, server: "ForkServer") -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Returns the exit code as `Popen.poll` does; None if the process is running. The process is not reaped, so
        that the system cannot give its id to another process yet."""
        return self._server.exit_code(self.pid) if self.returncode is None else self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits for the end of the process, reaps it, and returns its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank with process id {self.pid}", timeout or 0.0)
            time.sleep(_POLL_S)
        if self.returncode is None:
            self._server.reap(self.pid)
        self.returncode = code
        return code

    def signal_group(self, number: Signals) -> None:
        """Sends a signal to the rank and to the processes that it has started."""
        if self.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)


class ServerDied(RankError):
    """A fork server died, and the one that replaced it, too, before it could start a rank."""


class ForkServer:
    """The launcher's end of a fork server. A server that has died is replaced when the next rank is started."""

    def __init__(self, module: str, end: "_ServerEnd | None" = None) -> None:
        """`module` is what the server imports before it forks; nothing if it is empty."""
        self._module = module
        self._end = end or _spawn(module)
        self._lock = threading.Lock()

    def start_rank(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        streams: Mapping[int, int] | None = None,
    ) -> ForkedRank:
        """Starts a rank that calls `main()` of the module with `arguments` in `sys.argv`. `streams` are open files of
        this process by the numbers 0, 1 and 2 that they get in the rank; None means this process's own."""
        if streams is None:
            streams = {number: number for number in _STANDARD_STREAMS if _is_open(number)}
        request = {"start": [module, *arguments], "environment": dict(environment), "streams": list(streams)}
        descriptors = list(streams.values())
        answer = self._ask(request, descriptors)
        if answer is None:
            self.close()
            self._end = _spawn(self._module)
            answer = self._ask(request, descriptors)
        if answer is None:
            raise ServerDied("the process that starts the ranks died as soon as it was started")
        return ForkedRank(answer["pid"], self)

    def exit_code(self, pid: int) -> int | None:
        """Returns the exit code of a rank; None if it is running. The exit code 0 of a rank that ended before its work
        was done is `UNFINISHED`. If the server died, the rank was killed with SIGKILL."""
        answer = self._ask({"exit_code": pid})
        return -SIGKILL if answer is None else answer["code"]

    def reap(self, pid: int) -> None:
        self._ask({"reap": pid})

    def close(self) -> None:
        """Ends the server, and any rank that still runs."""
        self._end.connection.close()
        with suppress(ChildProcessError):
            os.waitpid(self._end.pid, 0)

    def _ask(self, request: dict[str, Any], descriptors: Sequence[int] = ()) -> dict[str, Any] | None:
        """Sends a request and returns the answer; None if the server has died."""
        with self._lock:
            try:
                _send(self._end.connection, request, descriptors)
                return _receive(self._end.connection)[0]
            except (OSError, EOFError):
                return None
            except BaseException:  # an interrupt: the next answer would be that to this request
                self._end.connection.close()
                raise


@dataclass(frozen=True)
class _ServerEnd:
    """A server process and the connection to it."""

    pid: int
    connection: socket.socket


def _spawn(module: str) -> _ServerEnd:
    """Starts a new Python process, which imports the module, unless its name is empty, before it forks."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "meshwright.processes.local.fork_server", str(theirs.fileno()), str(os.getpid())]
    with theirs:
        process = subprocess.Popen([*command, module], pass_fds=[theirs.fileno()], start_new_session=True)
    process.returncode = 0  # `close` waits for it
    return _ServerEnd(process.pid, ours)


def _fork(module: str) -> _ServerEnd:
    """Imports the module, and forks the server from this process, which is faster than starting a new one. In a process
    that cannot be forked the server is spawned instead."""
    can_fork = _can_fork()
    with phase("importing PyTorch, a few seconds", forks=True):
        importlib.import_module(module)
    if not can_fork:
        return _spawn(module)
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        exit_with_parent(launcher)
        _serve(theirs)
    theirs.close()
    return _ServerEnd(pid, ours)


def _can_fork() -> bool:
    """Returns whether forking this process is safe: it has run nothing of torch yet, and has no threads but those of
    libraries that handle forks themselves, such as OpenBLAS."""
    return "torch" not in sys.modules and threading.active_count() == 1 and sys.platform == "linux"


_preloaded: ForkServer | None = None


@contextmanager
def preloaded(module: str, spare: bool = True) -> Iterator[None]:
    """Imports the module, and keeps a fork server for all launches within the context. A command opens the context
    before it imports torch, so that the server can be forked from the command's own process. Without `spare`, launches
    start servers of their own."""
    global _preloaded
    if not spare:
        yield
        return
    previous, _preloaded = _preloaded, ForkServer(module, _fork(module))
    try:
        yield
    finally:
        _preloaded.close()
        _preloaded = previous


@contextmanager
def fork_server(module: str, spare: bool = True) -> Iterator[ForkServer]:
    """Yields the preloaded fork server, or a new one that ends with the context. Without `spare`, it is one that has
    not imported the module."""
    if _preloaded is not None and spare:
        yield _preloaded
        return
    server = ForkServer(module if spare else "")
    try:
        yield server
    finally:
        server.close()


@dataclass(frozen=True)
class _KeptServer:
    """A fork server that stays for the next launch, and the process and environment variables it was started with."""

    server: ForkServer
    pid: int
    environment: Mapping[str, str]


_kept: _KeptServer | None = None


@contextmanager
def kept_fork_server(module: str) -> Iterator[ForkServer]:
    """Yields the preloaded fork server, or one that stays until this process ends, so that later launches do not wait
    for imports. It is replaced when environment variables have changed, because some are read when torch is imported.
    An interrupt within the context ends it."""
    global _kept
    if _preloaded is not None:
        yield _preloaded
        return
    if _kept is not None and (_kept.pid, _kept.environment) != (os.getpid(), dict(os.environ)):
        _kept.server.close()
        _kept = None
    if _kept is None:
        _kept = _KeptServer(ForkServer(module), os.getpid(), dict(os.environ))
    kept = _kept
    try:
        yield kept.server
    except KeyboardInterrupt:
        kept.server.close()
        _kept = None
        raise


def _serve(connection: socket.socket) -> NoReturn:
    """Answers the launcher's requests until the launcher closes the connection."""
    signal(SIGINT, SIG_IGN)
    gc.freeze()  # garbage collections of ranks leave out the imported modules, and keep sharing their memory
    finished_of: dict[int, mmap.mmap] = {}  # by process id, one byte that the rank sets when its work is done
    while True:
        try:
            request, streams = _receive(connection)
        except (EOFError, OSError):
            os._exit(0)
        answer: dict[str, Any] = {}
        if "start" in request:
            finished = mmap.mmap(-1, 1)  # in memory that the rank shares with this process
            pid = os.fork()
            if pid == 0:
                connection.close()
                _replace_streams(dict(zip(request["streams"], streams, strict=True)))
                _become_rank(request["start"], request["environment"], finished)
            finished_of[pid] = finished
            answer = {"pid": pid}
        elif "exit_code" in request:
            answer = {"code": _exit_code(request["exit_code"], finished_of)}
        else:
            finished_of.pop(request["reap"], None)
            _waited_codes.pop(request["reap"], None)
            with suppress(ChildProcessError):
                os.waitpid(request["reap"], 0)
        for descriptor in streams:
            os.close(descriptor)
        _send(connection, answer)


def _send(connection: socket.socket, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
    content = json.dumps(message).encode()
    socket.send_fds(connection, [_LENGTH.pack(len(content))], descriptors)
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Returns a message and the open files that came with it. Raises EOFError at the end of the connection."""
    header, descriptors, _, _ = socket.recv_fds(connection, _LENGTH.size, len(_STANDARD_STREAMS))
    if len(header) < _LENGTH.size:
        raise EOFError
    (missing,) = _LENGTH.unpack(header)
    content = bytearray()
    while missing > len(content):
        received = connection.recv(missing - len(content))
        if not received:
            raise EOFError
        content += received
    message: dict[str, Any] = json.loads(content)
    return message, descriptors


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _replace_streams(streams: Mapping[int, int]) -> None:
    for standard, descriptor in streams.items():
        os.dup2(descriptor, standard)
        os.close(descriptor)


def _exit_code(pid: int, finished_of: Mapping[int, mmap.mmap]) -> int | None:
    """Returns the exit code of a rank, which is negative for signals, and None while the rank runs. The exit code 0 of
    a rank that ended before its work was done, for example because the user's code ended it, is `UNFINISHED`."""
    try:
        code = _process_exit_code(pid)
    except ChildProcessError:
        return -SIGKILL  # a rank of an earlier server, killed when that server died
    is_finished = pid in finished_of and finished_of[pid][0] == 1
    return UNFINISHED if code == 0 and not is_finished else code


_waited_codes: dict[int, int] = {}  # by process id, of processes that had to be waited for to know their exit code


def _process_exit_code(pid: int) -> int | None:
    """Returns the exit code of a child process, which is negative for signals, and None while it runs. May be called
    again after the process has ended, until it is reaped."""
    if hasattr(os, "waitid"):
        status = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status
    if pid not in _waited_codes:  # Python for macOS has waitid since 3.13
        ended, wait_status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            return None
        _waited_codes[pid] = os.waitstatus_to_exitcode(wait_status)
    return _waited_codes[pid]


def _become_rank(command: Sequence[str], environment: Mapping[str, str], finished: mmap.mmap) -> NoReturn:
    """Gives the forked process what a new Python process would have: a session, environment variables, the current
    folder as first folder of imports, threads and random numbers of its own. The rank sets the byte `finished` when its
    work is done."""
    fork_server_pid = os.getppid()
    os.setsid()
    signal(SIGTERM, SIG_DFL)
    os.environ.clear()
    os.environ.update({**environment, variables.FORK_SERVER_PID: str(fork_server_pid)})
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd()
    if "torch" in sys.modules and "OMP_NUM_THREADS" in environment:
        sys.modules["torch"].set_num_threads(int(environment["OMP_NUM_THREADS"]))
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    from meshwright.processes.local.start import run

    run(finished, *command)


def main() -> None:
    descriptor, launcher, module = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    exit_with_parent(launcher)
    if module:
        with suppress(BaseException):  # the rank that imports it again reports the error
            importlib.import_module(module)
    _serve(socket.socket(fileno=descriptor))


if __name__ == "__main__":
    main()

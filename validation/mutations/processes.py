"""Processes that are forked for each change, and what they leave behind."""

import ctypes
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Makes this process the parent of those whose own parent has died."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork(function: Callable[[], Any]) -> int:
    """Calls the function in a process of its own, which ends without Python's teardown."""
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    os.setsid()
    adopt_orphans()
    try:
        function()
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)


def wait(process: int) -> None:
    os.waitpid(process, 0)
    end_descendants()


def has_ended(process: int) -> bool:
    return os.waitpid(process, os.WNOHANG)[0] != 0


def end(process: int) -> None:
    os.kill(process, signal.SIGKILL)
    wait(process)


def end_descendants() -> None:
    """Kills what processes have left that this one started, and has adopted."""
    while children := list(_children(os.getpid())):
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for child in children:
            with suppress(ChildProcessError):
                os.waitpid(child, 0)


def _children(parent: int) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if folder.name.isdigit():
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == parent:
                    yield int(folder.name)


def fork_ranks_from_here() -> None:
    """Lets tests fork their ranks from a copy of this process, which has the changed functions and has imported
    everything, instead of from a new one."""
    from tests.forking import forked

    spawn = forked._spawn
    vars(forked)["_spawn"] = lambda module: _fork_server() if module == forked._IMPORTED else spawn(module)
    forked._server(forked._IMPORTED)


def _fork_server() -> Any:
    import atexit
    import weakref

    import tests.forking.imported  # noqa: F401
    from meshwright.processes.local import fork_server
    from meshwright.processes.process_exit import exit_with_parent

    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    process = os.fork()
    if process:
        theirs.close()
        return fork_server._ServerEnd(process, ours)
    ours.close()
    atexit._clear()
    for finalizer in weakref.finalize._registry:  # type: ignore[attr-defined]
        finalizer.atexit = False  # temporary folders of the tests
    os.setsid()
    exit_with_parent(launcher)
    fork_server._serve(theirs)
    raise AssertionError("a server ends with its process")

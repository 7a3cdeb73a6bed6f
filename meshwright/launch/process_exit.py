"""How the process of a rank ends: when its work is done, when its launcher dies, or with a recorded failure."""

import atexit
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from meshwright.errors import MeshwrightError
from meshwright.launch import output
from meshwright.launch.environment import Environment
from meshwright.launch.failure import Failure, failure_from_exception, write_record
from meshwright.launch.heartbeat import Heartbeat

_PR_SET_PDEATHSIG = 1


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process with this id, dies for any reason."""
    with suppress(OSError, AttributeError):  # without prctl, ranks end when the store is gone
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def exit_forked_process(code: object) -> NoReturn:
    """Ends a forked process as Python ends a program: joins threads, calls the functions registered with `atexit`, and
    flushes streams. But it skips the teardown of C++ libraries, because threads of torch sometimes abort the process
    there, and the launcher would then restart all ranks. `code` is the argument of `sys.exit`: a text is printed, and
    the exit code is then 1."""
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its forked processes
    atexit._run_exitfuncs()
    _flush()
    os._exit(0 if code is None else code if isinstance(code, int) else 1)


@contextmanager
def skip_library_teardown() -> Iterator[None]:
    """Within this context a successful end of the program exits at once with code 0. Otherwise threads of torch
    sometimes abort the process while C++ libraries are torn down, and the launcher would restart all ranks."""
    exit_handler = atexit.register(_exit_successfully)  # registered first, so it runs after all other handlers
    try:
        yield
    except SystemExit as exit:
        if exit.code not in (None, 0):
            atexit.unregister(exit_handler)
        raise
    except BaseException:
        atexit.unregister(exit_handler)
        raise


def _exit_successfully() -> None:
    logging.shutdown()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, output.stderr()):
        with suppress(OSError, ValueError):
            stream.flush()


def record_failure_and_exit(error: BaseException, env: Environment, heartbeat: Heartbeat) -> NoReturn:
    """Records and logs the failure, and ends the process at once, because a communicator that hangs could block a
    normal exit."""
    failure = failure_from_exception(error, env.rank, env.attempt, heartbeat)
    if env.folder is not None:
        with suppress(OSError):  # a full disk must not hide the failure itself
            write_record(env.folder, failure)
    with suppress(OSError, ValueError):
        _report(failure, launched_by_agent=env.fork_server_pid is not None)
    _flush()
    os._exit(error.exit_code if isinstance(error, MeshwrightError) else 1)


def _report(failure: Failure, launched_by_agent: bool) -> None:
    log = output.log()
    if log is not None:
        log.write(f"{failure.line}\n{failure.traceback}")
        log.flush()
    if not launched_by_agent:  # meshwright's own launcher prints the first cause itself
        print(failure.line, file=output.stderr())

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
from meshwright.processes import output
from meshwright.processes.environment import Environment
from meshwright.processes.failure import Failure, failure_from_exception, write_record
from meshwright.processes.heartbeat import Heartbeat

_PR_SET_PDEATHSIG = 1
_RECORD_S = 10.0  # how long a rank waits for the launcher to take its record


def exit_with_parent(parent: int) -> None:
    """Makes the kernel kill this process when its parent, the process with this id, dies for any reason."""
    with suppress(OSError, AttributeError):  # without prctl, ranks end when the store is gone
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent died before the call above
        os._exit(1)


def exit_forked_process() -> NoReturn:
    """Ends a forked process whose work is done with exit code 0, as Python ends a program: joins threads, calls the
    functions registered with `atexit`, and flushes streams. But it skips the teardown of C++ libraries, because threads
    of torch sometimes abort the process there, and the launcher would then restart all ranks."""
    threading._shutdown()  # type: ignore[attr-defined]  # as multiprocessing ends its forked processes
    atexit._run_exitfuncs()
    _flush()
    os._exit(0)


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
    error = output.explain_log_error(error) or error
    failure = failure_from_exception(error, env.rank, env.attempt, heartbeat)
    if env.fork_server_pid is None:  # meshwright's own launcher prints the first cause itself
        with suppress(OSError, ValueError):
            print(failure.line, file=output.stderr())
            if failure.report:
                print(f"the report of all ranks: {failure.report}", file=output.stderr())
    else:
        with suppress(Exception):  # the launcher is gone
            _send_to_launcher(failure)
    with suppress(OSError, ValueError):  # the log's disk may be full
        _write_to_log(failure)
    _flush()
    os._exit(error.exit_code if isinstance(error, MeshwrightError) else 1)


def _send_to_launcher(failure: Failure) -> None:
    # Imported here, because it imports torch, and the command that forks the fork server must not have done that.
    from meshwright.processes.token.machines import connect_launcher_store

    write_record(connect_launcher_store(_RECORD_S), failure)


def _write_to_log(failure: Failure) -> None:
    log = output.log()
    if log is not None:
        log.write(f"{failure.line}\n{failure.traceback}")
        log.flush()

"""How a rank ends: finished, with its launcher, or by its own failure, told and recorded."""

import atexit
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from meshwright.errors import MeshwrightError
from meshwright.launch import output
from meshwright.launch.environment import Environment
from meshwright.launch.failure import Failure, of_exception, write_record
from meshwright.launch.place import Place

_PR_SET_PDEATHSIG = 1


def die_with_agent(here: Environment) -> None:
    """Has the kernel kill this rank when the agent that started it dies, however it dies."""
    if here.agent is None:
        return
    with suppress(OSError, AttributeError):  # where there is no prctl, ranks end when the store is gone
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != here.agent:  # it died before the kernel was told
        os._exit(1)


@contextmanager
def finishing() -> Iterator[None]:
    """Around all that a rank does: what has finished ends as finished. Without this, torch's threads now and then
    abort the process while C++ takes itself down, and all ranks would start again for nothing."""
    finished = atexit.register(_end)  # before all others that are still to come, so it runs after them
    try:
        yield
    except SystemExit as exit:
        if exit.code not in (None, 0):
            atexit.unregister(finished)
        raise
    except BaseException:
        atexit.unregister(finished)
        raise


def _end() -> None:
    logging.shutdown()
    _flush()
    os._exit(0)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr, output.stderr()):
        with suppress(OSError, ValueError):
            stream.flush()


def fail(error: BaseException, here: Environment, place: Place) -> NoReturn:
    """Records and logs the failure, and ends the process at once: a hung communicator cannot keep it."""
    failure = of_exception(error, here.rank, here.attempt, place)
    if here.folder is not None:
        with suppress(OSError):  # a full disk must not hide the failure itself
            write_record(here.folder, failure)
    with suppress(OSError, ValueError):
        _tell(failure, launched_here=here.agent is not None)
    _flush()
    os._exit(error.exit_code if isinstance(error, MeshwrightError) else 1)


def _tell(failure: Failure, launched_here: bool) -> None:
    log = output.log()
    if log is not None:
        log.write(f"{failure.line}\n{failure.traceback}")
        log.flush()
    if not launched_here:  # our own launcher tells the first cause itself
        print(failure.line, file=output.stderr())

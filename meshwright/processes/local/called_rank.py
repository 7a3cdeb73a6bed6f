"""A rank of `mw.launch`: it receives a function, calls it, and reports how the call ended.

Descriptor 0 of the rank is a socket to the launcher, which sends a `Preparation` as JSON and the pickled call. The
rank sends a `Report` as JSON and, if it is rank 0 and the call succeeded, the pickled value. It then waits until the
launcher closes the connection, so that no rank leaves the process group while another still uses it.
"""

import faulthandler
import json
import linecache
import os
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TextIO

import torch

from meshwright.errors import CollectiveError
from meshwright.processes import environment
from meshwright.processes.communication_errors import communication_error
from meshwright.processes.local.function_pickle import pickle_value, unpickle_call
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.processes.world import leave
from meshwright.user.code import describe_error

_OUR_FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Preparation:
    """What a rank takes over from the process that called `mw.launch`: its import path, `sys.argv`, current folder, and
    the source code of notebook cells by file name, which tracebacks show. `device` is `cuda` or `cpu`."""

    import_path: list[str]
    arguments: list[str]
    folder: str
    cells: dict[str, str]
    device: str


@dataclass(frozen=True)
class Report:
    """How a call ended in a rank. `error` is the exception in one line and None after success; `traceback` begins in
    the user's code. `is_consequence` says that the exception may only mean that another rank is gone or late."""

    error: str | None = None
    traceback: str = ""
    is_consequence: bool = False


def main() -> None:
    rank = environment.read_environment()
    connection = _take_connection()
    _open_streams()
    process = os.getpid()
    admit_own_user_only()  # the function may make a process group itself
    try:
        _prepare(Preparation(**json.loads(connection.recv_bytes())), rank.local_rank)
        function, args, kwargs = unpickle_call(connection.recv_bytes())
        value = function(*args, **kwargs)
        _end_forked_copy(process, 0)
        pickled = pickle_value(value, function) if rank.rank == 0 else None
    except BaseException as error:
        _end_forked_copy(process, 1)
        _report_and_exit(error, connection)
    _send(connection, Report())
    if pickled is not None:
        connection.send_bytes(pickled)
    with suppress(EOFError, OSError):
        connection.recv_bytes()  # ends when the launcher closes the connection
    leave()


def _take_connection() -> Connection:
    """Returns the connection to the launcher, and gives the rank an empty stdin instead."""
    connection = Connection(os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return connection


def _open_streams() -> None:
    """Opens stdout and stderr again, because the fork server's may have another encoding, and show a line late."""
    sys.stdout = _line_buffered(1)
    sys.stderr = _line_buffered(2)
    faulthandler.enable(file=2)  # prints where a signal such as SIGSEGV ended the rank


def _line_buffered(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _prepare(preparation: Preparation, local_rank: int) -> None:
    os.chdir(preparation.folder)
    sys.path[:] = preparation.import_path
    sys.argv[:] = preparation.arguments
    for file, source in preparation.cells.items():
        # Without a time of last change, `linecache` does not look for the file.
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    if preparation.device == "cuda":
        torch.cuda.set_device(local_rank)


def _end_forked_copy(rank_process: int, exit_code: int) -> None:
    """Ends this process if the user's function has forked it from the rank: only the rank itself reports to the
    launcher."""
    if os.getpid() != rank_process:
        os._exit(exit_code)


def _report_and_exit(error: BaseException, connection: Connection) -> NoReturn:
    """Reports the exception and ends the process at once, because a communicator that hangs could block a usual end."""
    text = "".join(traceback.format_exception(type(error), error, _from_user_code(error.__traceback__)))
    is_consequence = isinstance(error, CollectiveError) or communication_error(error) is not None
    with suppress(OSError):  # the launcher is gone
        _send(connection, Report(describe_error(error), text, is_consequence))
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):  # the user's code may have replaced or closed it
            stream.flush()
    os._exit(1)


def _from_user_code(trace: TracebackType | None) -> TracebackType | None:
    """Returns the traceback without the calls of this package that lead to the user's function."""
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _OUR_FOLDER:
        trace = trace.tb_next
    return trace


def _send(connection: Connection, report: Report) -> None:
    connection.send_bytes(json.dumps(asdict(report)).encode())

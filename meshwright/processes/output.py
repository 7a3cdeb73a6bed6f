"""Where a rank's output goes: each rank has a log file, and only the speaker, usually rank 0, prints to the
terminal."""

import errno
import faulthandler
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from meshwright.errors import StorageError
from meshwright.files.storage import describe_storage_problem, writing
from meshwright.user.code import printable

_stderr: TextIO | None = None
_terminal: TextIO | None = None
_log: TextIO | None = None

_PACKAGE = Path(__file__).parents[1]
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def redirect(folder: Path, rank: int, attempt: int, speaker: int = 0) -> None:
    """Redirects the output of this process to its log. On the speaker, stdout, `terminal()` and Meshwright's own
    warnings stay on the terminal.

    File descriptors are redirected, because C++ libraries write there too. A second call changes nothing.
    """
    global _stderr, _terminal, _log
    if _log is not None:
        return
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without parents: a run folder that was deleted is not created again
        opened = log_file(folder, rank).open("a", buffering=1, errors="replace")
        opened.write(f"--- attempt {attempt}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n")
    _log = opened
    sys.stdout.flush()
    sys.stderr.flush()
    _stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    if rank == speaker:
        _terminal = _stderr
        warnings.showwarning = _warning_printer(_stderr)
    else:
        _terminal = _log
        os.dup2(_log.fileno(), 1)
    os.dup2(_log.fileno(), 2)
    faulthandler.enable(file=2)
    handler = logging.StreamHandler(_log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def _warning_printer(stream: TextIO) -> Callable[..., None]:
    """Returns a function in place of `warnings.showwarning`, which also prints the warnings of Meshwright's own code to
    this stream, as one line. Those of libraries are in the log only."""
    show = warnings.showwarning

    def show_and_print(
        message: Warning | str, category: type[Warning], filename: str, *place: Any, **more: Any
    ) -> None:
        show(message, category, filename, *place, **more)
        if Path(filename).is_relative_to(_PACKAGE):
            with suppress(OSError):
                print(f"warning: {printable(' '.join(str(message).split()))}", file=stream, flush=True)

    return show_and_print


def clear_progress() -> None:
    """Erases the progress bar that a killed rank left behind, and shows the cursor again."""
    if sys.stderr.isatty():
        print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr, flush=True)


def print_to_user(text: str) -> None:
    """Prints a line from the launcher to the user. A stream that cannot take it, such as a file on a full disk, does
    not stop the launcher."""
    with suppress(OSError):
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr, flush=True)


def terminal() -> TextIO:
    """Returns the stream for messages to the user: the original stderr on the speaker, and the log on other ranks."""
    return _terminal or sys.stderr


def stderr() -> TextIO:
    """Returns the original stderr of this rank. Failures are printed there if another launcher than meshwright's runs
    it."""
    return _stderr or sys.stderr


def explain_log_error(error: BaseException) -> StorageError | None:
    """Returns the error to show to the user if `error` comes from output to the log of this rank, such as a `print`
    while the log's disk is full; None if it does not."""
    if _log is None or not isinstance(error, OSError) or error.filename is not None or error.errno not in _DISK_ERRORS:
        return None
    try:
        os.write(_log.fileno(), b"\n")
    except OSError as log_error:
        return describe_storage_problem(log_error, Path(_log.name)) if log_error.errno == error.errno else None
    return None


def log() -> TextIO | None:
    """Returns the log of this rank; None before `redirect`."""
    return _log

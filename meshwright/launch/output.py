"""Where a rank's words go: each rank has a log file, and only one, mostly rank 0, speaks to the terminal."""

import faulthandler
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO

_stderr: TextIO | None = None
_terminal: TextIO | None = None
_log: TextIO | None = None


def log_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def redirect(folder: Path, rank: int, attempt: int, speaker: int = 0) -> None:
    """Sends the output of this process to its log; of the speaker, stdout and `terminal()` stay visible.

    It works on file descriptors, because C++ libraries write there too. A second call changes nothing.
    """
    global _stderr, _terminal, _log
    if _log is not None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    _log = log_file(folder, rank).open("a", buffering=1, errors="replace")
    _log.write(f"--- attempt {attempt}, process {os.getpid()}, {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n")
    sys.stdout.flush()
    sys.stderr.flush()
    _stderr = os.fdopen(os.dup(2), "w", buffering=1, errors="replace")
    if rank == speaker:
        _terminal = _stderr
    else:
        _terminal = _log
        os.dup2(_log.fileno(), 1)
    os.dup2(_log.fileno(), 2)
    faulthandler.enable(file=2)
    handler = logging.StreamHandler(_log)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.INFO)


def clear_progress() -> None:
    """A killed rank cannot put away its progress bar: takes off what it left of it, and shows the cursor again."""
    if sys.stderr.isatty():
        print("\r\x1b[2K\x1b[?25h", end="", file=sys.stderr, flush=True)


def tell(text: str) -> None:
    """A line from the launcher to the person who waits for its ranks."""
    print(text, file=sys.stderr, flush=True)


def terminal() -> TextIO:
    """What a person sees: the original stderr on the rank that speaks, the log on the others."""
    return _terminal or sys.stderr


def stderr() -> TextIO:
    """The original stderr on every rank: for last words that no launcher of ours will pass on."""
    return _stderr or sys.stderr


def log() -> TextIO | None:
    """The log of this rank, where it has one."""
    return _log

"""The user's code: its exceptions are reported with file and line, it cannot end the process unnoticed, and what takes
long in it is announced."""

import os
import signal
import sys
import sysconfig
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from meshwright import errors
from meshwright.errors import MeshwrightError, UserCodeError, chain_of

SLOW_S = 5.0  # an import or a constructor that takes longer is announced on stderr

_INSTALLED = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARY_FOLDERS = (Path(errors.__file__).parent, *map(Path, _INSTALLED))


def printable(text: str) -> str:
    """Returns the text with what a terminal would obey, such as escape sequences, written as in Python's source."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def describe_error(error: BaseException) -> str:
    """Returns one line about an exception of a user's or a library's code: its class and message, and the file and line
    of the user's code in which it was raised. If none of the user's code was running, it is the line that raised it."""
    raised_at = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)[-1:]]
    position = user_position(error) or (raised_at[0] if raised_at else None)
    message = printable(" ".join(_message(error).split()))
    if isinstance(error, SystemExit):
        message = f"exit code {0 if error.code is None else error.code}"
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    return f"{text} ({position[0]}, line {position[1]})" if position else text


def first_line(error: BaseException) -> str:
    """Returns the first line of an exception's message, or its class if it has no message. If the exception came
    through the user's code, the file and line follow."""
    text = printable(_message(error).strip().partition("\n")[0]) or type(error).__name__
    position = user_position(error)
    return f"{text} ({position[0]}, line {position[1]})" if position else text


def _message(error: BaseException) -> str:
    """Returns the message of an exception; empty if computing it fails, as it can in a class of the user."""
    try:
        return str(error)
    except Exception:
        return ""


def user_position(error: BaseException) -> tuple[str, int] | None:
    """Returns the file and line of the innermost call in the user's code that the exception, or the exception that
    caused it, came through. Returns None if it came through no code of the user."""
    for raised in chain_of(error):
        for frame in reversed(traceback.extract_tb(raised.__traceback__)):
            if is_user_file(frame.filename):
                return frame.filename, frame.lineno or 0
    return None


def running_line() -> str:
    """Returns the line that runs now, as `FILE, line N`: the innermost one of the user's code, or, if none of it runs,
    the innermost one outside of torch and meshwright, such as that of a library's model."""
    in_library = ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_user_file(file):
            return f"{file}, line {frame.f_lineno}"
        if not in_library and not is_machinery(file):
            in_library = f"{file}, line {frame.f_lineno}"
        frame = frame.f_back
    return in_library or "the model's code"


def line_of_function(function: Any) -> str:
    """Returns the line where a function begins, as `FILE, line N`; empty for functions that are not written in
    Python."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}, line {code.co_firstlineno}" if code else ""


def is_machinery(file: str) -> bool:
    """Whether a file belongs to meshwright, to torch or to Python itself."""
    path, torch = Path(file), sys.modules.get("torch")
    if path.is_relative_to(_LIBRARY_FOLDERS[0]) or file.startswith("<"):
        return True
    if torch is not None and path.is_relative_to(Path(str(torch.__file__)).parent):
        return True
    return path.is_relative_to(_INSTALLED[0]) and "site-packages" not in path.parts


def is_user_file(file: str) -> bool:
    """Whether a file of a traceback is the user's, and not one of meshwright, of Python or of an installed library. A
    library may also be in a folder that a `.pth` file or `PYTHONPATH` names."""
    if file.startswith("<"):
        return False
    folders = [*_LIBRARY_FOLDERS, *(Path(entry) for entry in sys.path if _has_installed_packages(entry))]
    return not any(Path(file).is_relative_to(folder) for folder in folders)


@cache
def _has_installed_packages(folder: str) -> bool:
    """Whether pip has installed packages into this folder: each of them has a folder of metadata there. A project that
    is installed in editable mode, which is the user's own code, has it elsewhere."""
    try:
        return bool(folder) and any(entry.suffix == ".dist-info" for entry in Path(folder).iterdir())
    except OSError:  # a zip file, or a folder that does not exist
        return False


def raise_user_code_error(error: BaseException, what_failed: str) -> NoReturn:
    """Raises a `UserCodeError` that begins with `what_failed` and describes `error`, an exception out of the user's
    code. This is needed wherever Python would take the exception for something else: `StopIteration` for the end of the
    data, `SystemExit` for the end of the program. A `MeshwrightError` and a Ctrl-C are raised as they are."""
    if isinstance(error, MeshwrightError) or (isinstance(error, KeyboardInterrupt) and _may_be_ctrl_c()):
        raise error
    raise UserCodeError(f"{what_failed}: {describe_error(error)}") from error


@contextmanager
def exits_become_errors() -> Iterator[None]:
    """Within this context, `os._exit` raises SystemExit in this thread, so that the user's code cannot end the process
    without a message. A Ctrl-C is remembered, so that it can be told from a KeyboardInterrupt that the user's code
    raises. Processes that are forked within the context end as usual."""
    process, thread, end_process = os.getpid(), threading.get_ident(), os._exit

    def raise_system_exit(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != (process, thread):
            end_process(status)
        raise SystemExit(status)

    handler = _InterruptHandler()
    handles_interrupts = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if handles_interrupts:
        signal.signal(signal.SIGINT, handler)
    os._exit = raise_system_exit
    try:
        yield
    finally:
        os._exit = end_process
        if handles_interrupts and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class _InterruptHandler:
    """Handles SIGINT as Python does, and remembers in `received` that the signal came."""

    def __init__(self) -> None:
        self.received = False

    def __call__(self, number: int, frame: FrameType | None) -> NoReturn:
        self.received = True
        raise KeyboardInterrupt


def _may_be_ctrl_c() -> bool:
    """Whether a KeyboardInterrupt can come from a signal. It cannot if signals are ignored, or handled otherwise, as in
    ranks."""
    handler = signal.getsignal(signal.SIGINT)
    return handler.received if isinstance(handler, _InterruptHandler) else handler is signal.default_int_handler


@contextmanager
def working_folder_kept() -> Iterator[None]:
    """After this context the working folder is what it was before. The user's code within it may change it, and the
    paths of the job and of the run are relative to the folder in which the command began."""
    try:
        before = os.getcwd()
    except OSError:  # it was deleted
        yield
        return
    try:
        yield
    finally:
        with suppress(OSError):
            os.chdir(before)


@contextmanager
def running_user_code(activity: str) -> Iterator[None]:
    """The context for an import or a constructor of the user's: it is announced if it is slow, and it leaves the
    working folder as it was."""
    with announced_if_slow(activity), working_folder_kept():
        yield


@contextmanager
def announced_if_slow(activity: str) -> Iterator[None]:
    """Tells the user on stderr what is going on if the context takes longer than `SLOW_S`."""
    line = f"{activity} since {SLOW_S:g} s"
    timer = threading.Timer(SLOW_S, lambda: print(line, file=sys.stderr, flush=True))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # so that processes which are forked later are forked from a single thread

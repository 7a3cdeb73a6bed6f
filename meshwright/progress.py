"""What a command is doing while its user waits.

Code that may take long names its phases: `with phase("tracing the model", about_s=5)`. They are shown only within
`showing`, which the command line opens: on a terminal as a line that disappears with the phase, elsewhere as one plain
line for each phase that lasts longer than `SHOWN_AFTER_S`. A library that is imported shows nothing.
"""

import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

SHOWN_AFTER_S = 2.0
_REFRESH_S = 0.25
_ERASE_LINE = "\r\x1b[2K"


class _Display:
    """Shows the innermost phase on a stream. It does nothing in processes that were forked from this one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._pid = os.getpid()
        self._is_terminal = stream.isatty()
        self._lock = threading.Lock()
        self._is_drawn = False
        self._phases: list[object] = []  # the innermost last, each named by an object of its own

    @property
    def is_here(self) -> bool:
        return os.getpid() == self._pid

    @contextmanager
    def still_phase(self, text: str) -> Iterator[None]:
        """Shows the phase without a thread, on terminals only."""
        if self._is_terminal:
            self._draw(f"{text} …")
        try:
            yield
        finally:
            self.erase()

    @contextmanager
    def phase(self, text: str, about_s: float | None) -> Iterator[None]:
        """Shows the phase while the context lasts. The thread that does so ends with it."""
        ended = threading.Event()
        self._phases.append(ended)
        thread = threading.Thread(target=self._show, args=(text, about_s, ended), daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            self._phases.remove(ended)
            self.erase()

    def erase(self) -> None:
        """Removes the line of the phase, so that others can print."""
        with self._lock, suppress(OSError, ValueError):
            if self._is_drawn:
                self._stream.write(_ERASE_LINE)
                self._stream.flush()
            self._is_drawn = False

    def _show(self, text: str, about_s: float | None, ended: threading.Event) -> None:
        begin = time.monotonic()
        about = "" if about_s is None or about_s < SHOWN_AFTER_S else f", about {describe_seconds(about_s)}"
        if not self._is_terminal:
            if not ended.wait(SHOWN_AFTER_S) and self._phases[-1] is ended:
                self._write(f"{text}{about} …\n")
            return
        while not ended.wait(_REFRESH_S):
            elapsed_s = time.monotonic() - begin
            elapsed = f" {describe_seconds(elapsed_s)}" if elapsed_s >= 1 else ""
            if self._phases[-1] is ended:
                self._draw(f"{text}{about} …{elapsed}", ended)

    def _draw(self, text: str, ended: threading.Event | None = None) -> None:
        with self._lock, suppress(OSError, ValueError):
            if ended is None or not ended.is_set():
                self._stream.write(_ERASE_LINE + _cut(text, self._columns()))
                self._stream.flush()
                self._is_drawn = True

    def _write(self, text: str) -> None:
        with self._lock, suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            return 80


_display: _Display | None = None


@contextmanager
def showing(stream: TextIO) -> Iterator[None]:
    """Shows the phases of this process on the stream while the context lasts."""
    global _display
    previous, _display = _display, _Display(stream)
    try:
        yield
    finally:
        _display = previous


@contextmanager
def phase(text: str, about_s: float | None = None, *, forks: bool = False) -> Iterator[None]:
    """Names what is done within the context, and about how many seconds it may take. Of phases within each other, the
    innermost is shown. With `forks`, no thread is started, because this process is
    forked within the context; such a phase is shown on terminals only."""
    if _display is None or not _display.is_here:
        yield
        return
    with _display.still_phase(text) if forks else _display.phase(text, about_s):
        yield


def say(line: str) -> None:
    """Prints a line to stderr, above the line of a phase. On a terminal it is wrapped between words."""
    if _display is not None and _display.is_here:
        _display.erase()
    text = wrapped(line, shutil.get_terminal_size().columns) if sys.stderr.isatty() else line
    print(text, file=sys.stderr, flush=True)


def describe_seconds(seconds: float) -> str:
    """Returns a duration for people: `8 s`, `2 min 5 s`, `1 h 10 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole % 60 else "")
    return f"{whole // 3600} h" + (f" {whole % 3600 // 60} min" if whole % 3600 // 60 else "")


NO_BREAK = "\u00a0"  # a space between a number and its unit, at which no line is wrapped


def wrapped(text: str, columns: int, indent: int = 2) -> str:
    """Returns the text with lines of at most this length that break between words only; a longer word stays whole. What
    continues a line is indented as much as the line, and by `indent` more."""
    lines = []
    for line in text.split("\n"):
        margin = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line, columns, subsequent_indent=margin + " " * indent, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def _cut(text: str, columns: int) -> str:
    return text if len(text) < columns else text[: columns - 2] + "…"

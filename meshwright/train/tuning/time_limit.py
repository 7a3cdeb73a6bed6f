"""A limit for code that this process cannot end otherwise, such as a compilation."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from types import FrameType

import torch

_LATER_S = 0.05


class LimitReached(BaseException):
    """The time is over. Not an `Exception`, so that a compiler does not take it for a problem of the code."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `LimitReached` within this context once the seconds are over, between two of Python's instructions; not
    while a CUDA graph is being captured. A script's own alarm signal is sent when it is due, or right after the
    context. Other threads than the main one get no signals; there is no limit in them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_over = False

    def end(_: int, __: FrameType | None) -> None:
        if is_over:
            return
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            signal.setitimer(signal.ITIMER_REAL, _LATER_S)
            return
        raise LimitReached

    begin = monotonic()
    previous = signal.signal(signal.SIGALRM, end)
    due_s, interval_s = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        try:
            yield
        finally:
            is_over = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if previous is None else previous)
        if due_s:
            signal.setitimer(signal.ITIMER_REAL, max(1e-3, due_s - (monotonic() - begin)), interval_s)

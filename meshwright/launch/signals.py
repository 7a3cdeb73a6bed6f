"""Whether this process was asked to stop: signals become a flag that is looked at between two steps."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

# Wrappers such as `uv run` pass a Ctrl-C on that the terminal has delivered already: one wish, two signals.
_SAME_WISH_S = 0.3


class StopRequest:
    """Turns signals into `requested`, and a second Ctrl-C into `insisted`, while the context lasts.

    In a rank it belongs after `join`: before, a rank may wait inside C++ code, where no Python handler runs,
    and the default action of SIGTERM is the right one. Outside the main thread it does nothing.
    """

    def __init__(self, signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT)) -> None:
        self.received: signal.Signals | None = None
        self.insisted = False
        self._signals = signals
        self._first_s = 0.0
        self._pid = os.getpid()
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self.received is not None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                ignored = signal.getsignal(number) == signal.SIG_IGN
                if number == signal.SIGHUP and ignored:
                    continue  # started by nohup: closing the terminal is not meant to stop it
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _default(number)
        elif self.received is None:
            self.received = signal.Signals(number)
            self._first_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_s > _SAME_WISH_S:
            self.insisted = True


def _default(number: int) -> None:
    """Forked children (data loader workers) inherit the handler, but must die when their parent says so."""
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

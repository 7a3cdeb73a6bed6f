"""`StopRequest`: turns signals into a flag that training checks between two steps."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

# Wrappers such as `uv run` forward a Ctrl-C that the terminal has delivered already. Two signals within this time count
# as one.
_DUPLICATE_SIGNAL_S = 0.3


class StopRequest:
    """Within this context, a signal sets `requested`, and a second signal that is Ctrl-C sets `insisted`.

    A rank should enter the context after `join`. During `join` it may wait inside C++ code, where no Python handler
    runs, and the default action of SIGTERM is the right one. Outside the main thread the context does nothing.
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
                    continue  # started by nohup: closing the terminal must not stop it
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            _apply_default_action(number)
        elif self.received is None:
            self.received = signal.Signals(number)
            self._first_s = time.monotonic()
        elif number == signal.SIGINT and time.monotonic() - self._first_s > _DUPLICATE_SIGNAL_S:
            self.insisted = True


def _apply_default_action(number: int) -> None:
    """Ends a forked child such as a data loader worker, which inherits the handler but must end when its parent sends a
    signal."""
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

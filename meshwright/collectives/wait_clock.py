"""`WaitClock`: counts how long this process is blocked in exchanges with other ranks, as `time.process_time` counts how
long it computes, and knows what it is blocked in. What is exchanged while the process computes does not count."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Describe = str | Callable[[], str]  # an exchange in words, or a function that returns them


class WaitClock:
    """`seconds` only grows. A reader takes the difference of two readings. `exchange` is what the process is blocked
    in, or has failed in; None if it is not blocked, or if nobody says in what."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.exchange: Describe | None = None

    @contextmanager
    def blocked(self, exchange: Describe | None = None) -> Iterator[None]:
        """Counts the time inside the context. The context is not entered twice at once."""
        self.exchange = exchange
        began = time.perf_counter()
        try:
            yield
            self.exchange = None
        finally:
            self.seconds += time.perf_counter() - began

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Counts the time inside the context that is not counted within it already. Does not say what it is."""
        began, counted = time.perf_counter(), self.seconds
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began - (self.seconds - counted)

    def waiting(self) -> str | None:
        """Returns in words what the process is blocked in, or has failed in. Any thread may call this."""
        exchange = self.exchange
        return exchange() if callable(exchange) else exchange


WAIT_CLOCK = WaitClock()  # of this process

"""`WaitClock`: counts how long this process is blocked in exchanges with other ranks, as `time.process_time` counts how
long it computes. What is exchanged while the process computes does not count."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class WaitClock:
    """`seconds` only grows. A reader takes the difference of two readings."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Counts the time inside the context. The context is not entered twice at once."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - began


WAIT_CLOCK = WaitClock()  # of this process

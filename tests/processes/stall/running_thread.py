"""Looks at the stack of a thread that goes on meanwhile, in a way in which the interpreter crashed: while the frames of
a deep stack are read, a garbage collection lets the thread leave them.

    python -m tests.processes.stall.running_thread WAY

prints how often it has looked."""

import gc
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from meshwright.bench.strategies.time_samples import TimeSampler
from meshwright.processes.stall.position import stack_of

LOOKS = 1000
_DEPTH = 900


class Garbage:
    """Is collected, not freed, and lets other threads run then."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        time.sleep(0)


WAYS: dict[str, Callable[[FrameType | None], object]] = {
    "stack_of": stack_of,
    "TimeSampler": TimeSampler()._is_exchanging,
}


def deep(depth: int) -> None:
    if depth:
        deep(depth - 1)


def main(way: str) -> None:
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            deep(_DEPTH)

    thread = threading.Thread(target=work)
    thread.start()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(3)
    for _ in range(LOOKS):
        Garbage()
        WAYS[way](sys._current_frames().get(thread.ident or 0))
    is_over.set()
    thread.join()
    print(LOOKS)


if __name__ == "__main__":
    main(sys.argv[1])

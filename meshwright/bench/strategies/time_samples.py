"""What a CPU rank does at many moments of its steps: compute, or take part in an exchange with other ranks.

A thread of the rank looks at the rank's main thread about once a millisecond. A moment counts as an exchange if

- the main thread runs code that exchanges tensors (`_EXCHANGING`), or
- the main thread sleeps, and no thread of OpenMP computes for it: it waits for a transfer, or for another rank.

Every other moment counts as computing. Clocks of ranks on one machine agree, so that the moments of all ranks can be
compared (`time_shares.py`).
"""

import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Self

from meshwright.processes.stall.position import stack_of

_INTERVAL_S = 0.001
_TASKS = Path("/proc/self/task")
_LISTED_EVERY = 50  # samples, after which new threads are looked for
_DEEPEST = 60  # frames that are looked at
_EXCHANGING = (
    "/meshwright/collectives/",
    "/meshwright/parallel/differentiable_collectives.py",
    "/meshwright/parallel/pipeline/transport.py",
    "/meshwright/processes/peer_connection.py",
    "/torch/distributed/distributed_c10d.py",
    "/torch/distributed/_functional_collectives.py",
    "/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py",
)

Sample = tuple[float, bool]  # the time, and whether the rank was in an exchange


class TimeSampler:
    """Looks at the thread that creates it, within its context. `samples` are the moments in order; empty on systems
    without /proc."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._main = threading.current_thread()
        self._stopped = threading.Event()
        self._is_exchange_code: dict[CodeType, bool] = {}
        self._thread = threading.Thread(target=self._sample, daemon=True, name="time sampler")

    def __enter__(self) -> Self:
        if _TASKS.is_dir():
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _sample(self) -> None:
        states = _ThreadStates(self._main)
        while not self._stopped.wait(_INTERVAL_S):
            frame = sys._current_frames().get(self._main.ident or 0)
            is_exchange = self._is_exchanging(frame) or (states.main_sleeps() and not states.others_compute())
            self.samples.append((time.monotonic(), is_exchange))
        states.close()

    def _is_exchanging(self, frame: FrameType | None) -> bool:
        for inner, _ in stack_of(frame)[: -_DEEPEST - 1 : -1]:
            code = inner.f_code
            if code not in self._is_exchange_code:
                self._is_exchange_code[code] = any(part in code.co_filename for part in _EXCHANGING)
            if self._is_exchange_code[code]:
                return True
        return False


class _ThreadStates:
    """The states of this process's threads, which the kernel writes to /proc."""

    def __init__(self, main: threading.Thread) -> None:
        self._main = str(main.native_id)
        self._files: dict[str, int] = {}
        self._looks = 0
        self._list()

    def main_sleeps(self) -> bool:
        self._looks += 1
        if self._looks % _LISTED_EVERY == 0:
            self._list()
        return self._state(self._main) not in "RD"

    def others_compute(self) -> bool:
        """Whether a thread other than the main one runs that neither Python nor a backend of torch has started."""
        return any(self._state(name) == "R" for name in self._files if name != self._main)

    def close(self) -> None:
        for file in self._files.values():
            os.close(file)

    def _list(self) -> None:
        of_python = {str(thread.native_id) for thread in threading.enumerate()} - {self._main}
        for name in os.listdir(_TASKS):
            if name in self._files or name in of_python:
                continue
            with suppress(OSError):
                if "gloo" not in (_TASKS / name / "comm").read_text():
                    self._files[name] = os.open(_TASKS / name / "stat", os.O_RDONLY)

    def _state(self, name: str) -> str:
        try:
            fields = os.pread(self._files[name], 512, 0)
        except (OSError, KeyError):
            return "?"
        return chr(fields[fields.rindex(b")") + 2])

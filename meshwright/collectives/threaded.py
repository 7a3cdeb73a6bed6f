"""`Threaded`: a reducer whose work is done in a thread of its own, bucket after bucket, while backward goes on."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError


class Threaded:
    """`reduce` leaves the mean over the ranks in a flat tensor; it is given the bucket's number, and raises where ranks
    are missing. After that the ranks no longer agree which bucket comes next, so all that follows raises, too."""

    def __init__(self, name: str, group: dist.ProcessGroup, reduce: Callable[[Tensor, int], None]) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._name = name
        self._reduce = reduce
        self._started: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()
        self._change = threading.Condition()
        self._open = 0  # buckets that were started and are not done
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"{name} all-reduce", daemon=True)
        self._thread.start()

    def start(self, flat: Tensor, bucket: int) -> None:
        if flat.device.type != "cpu":
            # Gloo ends the process over a send from a GPU.
            raise CollectiveError(f"{self._name} all-reduce of bucket {bucket} on {flat.device}: only on CPUs")
        assert flat.is_floating_point(), f"the mean of {flat.dtype}"
        with self._change:
            self._raise_error()
            self._open += 1
        self._started.put((flat.detach().view(-1), bucket))

    def finish(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._open == 0 or self._error is not None)
            self._raise_error()

    def close(self) -> None:
        """What was started is done first."""
        self._started.put(None)
        if threading.current_thread() is not self._thread:  # the last one to know of it may be the thread itself
            self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CollectiveError(str(self._error)) from self._error

    def _work(self) -> None:
        while (started := self._started.get()) is not None:
            error: Exception | None = None
            try:
                self._reduce(*started)
            except Exception as found:
                error = found
            with self._change:
                self._open -= 1
                self._error = error
                self._change.notify_all()
            if error is not None:
                return

"""`ThreadedReducer`: a reducer that averages buckets one after another in a thread, while the backward pass
continues."""

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

from meshwright.errors import CollectiveError


class ThreadedReducer:
    """A `Reducer` that calls `reduce(flat, bucket)` in a thread, for one bucket after another. `reduce` replaces a flat
    tensor, in place, by the mean over the ranks, and raises if a rank is missing. After an error all later calls raise
    too, because the ranks no longer agree on which bucket is next."""

    def __init__(self, name: str, group: dist.ProcessGroup, reduce: Callable[[Tensor, int], None]) -> None:
        self.ranks = dist.get_process_group_ranks(group)
        self._name = name
        self._reduce = reduce
        self._queue: SimpleQueue[tuple[Tensor, int] | None] = SimpleQueue()
        self._change = threading.Condition()
        self.awaited: int | None = None  # the bucket that the thread averages
        self._unfinished = 0  # number of buckets that were started and are not finished
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"{name} all-reduce", daemon=True)
        self._thread.start()

    def start(self, flat: Tensor, bucket: int) -> None:
        if flat.device.type != "cpu":
            # Gloo would abort the process when it sends from a GPU.
            raise CollectiveError(f"{self._name} all-reduce of bucket {bucket} on {flat.device}: only on CPUs")
        assert flat.is_floating_point(), f"{flat.dtype} has no mean"
        with self._change:
            self._raise_error()
            self._unfinished += 1
        self._queue.put((flat.detach().view(-1), bucket))

    def finish(self) -> None:
        with self._change:
            self._change.wait_for(lambda: self._unfinished == 0 or self._error is not None)
            self._raise_error()

    def close(self) -> None:
        """Ends the thread after it has finished all buckets that were started."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # it is, if the thread dropped the reducer's last reference
            self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise CollectiveError(str(self._error)) from self._error

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            error: Exception | None = None
            self.awaited = item[1]
            try:
                self._reduce(*item)
                self.awaited = None
            except Exception as caught:
                error = caught
            with self._change:
                self._unfinished -= 1
                self._error = error
                self._change.notify_all()
            if error is not None:
                return

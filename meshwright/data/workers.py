"""Starts and ends the worker processes of a loader. Workers ignore signals that are sent to the whole process group.
Therefore a rank that receives a stop signal can still load data, finish its step and save. Workers exit when their rank
has ended."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import parent_process
from pathlib import Path
from typing import Any

import torch
from torch._C import _remove_worker_pids as remove_worker_pids
from torch.utils.data import DataLoader, Dataset

from meshwright.data.batch import LoadingOptions
from meshwright.errors import MeshwrightError, RankError

_WATCH_S = 0.5
_TORCH_FIRST_S = 0.5  # torch's own time limit ends a wait before the thread that watches it
_TIMEOUT = "DataLoader timed out"  # what torch's exception says


def load_items(dataset: Dataset[Any], loading: LoadingOptions, keys: Iterable[Any] | None = None) -> Iterator[Any]:
    """Yields `dataset[key]` for each of `keys`, or the items of an iterable data set if `keys` is None. Items are not
    collated, so they must be batches already. Closing or dropping the iterator ends the workers."""
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=keys,
        num_workers=loading.workers,
        collate_fn=_unchanged,
        pin_memory=loading.pin_memory and torch.accelerator.is_available(),
        worker_init_fn=partial(_start_users_worker, loading.start_worker) if loading.start_worker else _start_worker,
        generator=torch.Generator(),  # otherwise starting a loader would draw from the model's generator
        **_timeout(loading),
        **loading.loader_options,
    )
    with _signals_blocked():
        iterator = iter(loader)
    limit = None if loading.timeout_s is None else _TimeLimit(iterator, loading)
    # A rank with a GPU reads its samples with one thread, as worker processes do: on machines on which waking a thread
    # takes milliseconds, several threads make the small operators of a data set slow.
    reading = _one_thread if loading.workers == 0 and loader.pin_memory else nullcontext
    try:
        while True:
            try:
                with reading(), limit or nullcontext():
                    data = next(iterator)
            except StopIteration:
                return
            except RuntimeError as error:
                if _TIMEOUT not in str(error):
                    raise
                late = _late_worker(iterator, loading)
                _kill_workers(iterator)
                raise late from None
            except MeshwrightError as error:
                if loading.workers == 0:
                    raise
                error.__traceback__ = None  # it refers to the loader, and would keep the workers running
                raise type(error)(_original_message(error)) from error
            yield data
            del data  # frees the batch while waiting for the next one
    finally:
        if limit is not None:
            limit.close()
        del iterator, limit


def _timeout(loading: LoadingOptions) -> dict[str, Any]:
    return {} if loading.timeout_s is None else {"timeout": loading.timeout_s}


class _TimeLimit:
    """A context in which the rank takes a batch, for each batch again. Torch limits how long the rank waits until a
    worker begins to hand a batch over. If the worker stops in the middle of that, torch waits in a read that has no
    limit. One thread for all batches then kills the workers, which ends the read with an exception, and the context
    raises the error that names the worker."""

    def __init__(self, iterator: Any, loading: LoadingOptions) -> None:
        assert loading.timeout_s is not None
        self._iterator = iterator
        self._loading = loading
        self._limit_s = loading.timeout_s + _TORCH_FIRST_S
        self._changed = threading.Condition()
        self._end: float | None = None  # when the time of the batch is over; None when it is there
        self._is_idle = False  # whether the thread waits until the next batch is taken
        self._is_closed = False
        self._late: RankError | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    def __enter__(self) -> None:
        with self._changed:
            self._end = time.monotonic() + self._limit_s
            if self._is_idle:
                self._changed.notify()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._changed:
            self._end = None
            late = self._late
        if late is not None and (kind is None or issubclass(kind, Exception)):
            raise late from None

    def close(self) -> None:
        """Ends the thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_closed:
                left_s = None if self._end is None else self._end - time.monotonic()
                if left_s is not None and left_s <= 0:
                    self._end_the_read()
                    return
                self._is_idle = left_s is None
                self._changed.wait(left_s)

    def _end_the_read(self) -> None:
        self._late = _late_worker(self._iterator, self._loading)
        _kill_workers(self._iterator)
        if not hasattr(self._iterator, "_pin_memory_thread"):  # a thread of torch waits instead
            self._iterator._worker_result_queue._writer.close()  # the last writer: the read ends


def _late_worker(iterator: Any, loading: LoadingOptions) -> RankError:
    """Returns the error that names the worker that is stopped, or else the worker whose turn it is. It does not name
    the process, so that the launcher sees that the same worker is late at the same step again."""
    stopped = [number for number, worker in enumerate(iterator._workers) if _is_stopped(worker.pid)]
    number, *_ = stopped or iterator._task_info.get(iterator._rcvd_idx, (None,))
    worker = f"worker {number}" if number is not None else "a worker"
    cause = (
        "a signal or a debugger has stopped it"
        if stopped
        else "it hangs in the data set's code or waits for the disk; raise data.timeout_s if its batches take that long"
    )
    return RankError(
        f"{worker} of {loading.workers} that load data has not answered within {loading.timeout_s:g} s"
        f" (data.timeout_s): {cause}"
    )


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False


def _kill_workers(iterator: Any) -> None:
    """Ends the workers of a loader of which one hangs: torch would first wait 5 s for each of them to end by itself,
    and then send a signal that a stopped process does not receive. Torch must not report that they were killed."""
    if iterator._worker_pids_set:
        iterator._worker_pids_set = False
        remove_worker_pids(id(iterator))
    for worker in iterator._workers:
        worker.kill()


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _unchanged(data: Any) -> Any:
    return data


def _original_message(error: MeshwrightError) -> str:
    """Returns the message of the exception that a worker raised. Torch puts the worker's whole traceback before this
    message, which is in the last line."""
    text = str(error).strip()
    return text.rpartition("\n")[2].partition(": ")[2] if "Original Traceback" in text else text


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks signals while workers start. Workers inherit the block, so no signal can end a worker before it ignores
    signals."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_users_worker(start_worker: Callable[[int], None], worker: int) -> None:
    """Runs first in a worker process of a loader that has a `worker_init_fn` of the user."""
    _start_worker(worker)
    start_worker(worker)


def _start_worker(worker: int) -> None:
    """Runs first in a worker process, after torch has limited it to one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    else:  # macOS cannot tell who sent a signal: losing a worker is better than keeping one that nothing can end
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    rank = parent_process()
    assert rank is not None
    threading.Thread(target=_watch_rank, args=(rank.pid,), daemon=True).start()


def _watch_rank(rank: int | None) -> None:
    """Ends the worker when its rank is gone, or when the rank sends SIGTERM. SIGTERM from any other process is ignored.

    Torch and multiprocessing send SIGTERM to a busy worker, and to every worker when the rank exits, and then wait for
    the worker. A worker that ignored this SIGTERM, too, would keep its rank from ending.
    """
    while os.getppid() == rank:
        if hasattr(signal, "sigtimedwait"):
            caught = signal.sigtimedwait({signal.SIGTERM}, _WATCH_S)
            if caught is not None and caught.si_pid == rank:
                break
        else:
            threading.Event().wait(_WATCH_S)
    os._exit(0)  # not sys.exit: the main thread may be blocked, for example in a pipe that nobody reads any more

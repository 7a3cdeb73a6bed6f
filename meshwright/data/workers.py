"""How worker processes live and end: they outlast signals meant for the whole process group, so that a rank
can finish and save, and never outlast their rank."""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing import parent_process
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from meshwright.data.batch import Loading
from meshwright.errors import MeshwrightError

_WATCH_S = 0.5


def fetched(dataset: Dataset[Any], loading: Loading, fetches: Iterable[Any] | None = None) -> Iterator[Any]:
    """What `dataset` makes of each of `fetches` (a stream: of its iteration), collated already.

    Closing the iterator, or dropping it, ends the workers.
    """
    loader = DataLoader(
        dataset,
        batch_size=None,
        sampler=fetches,
        num_workers=loading.workers,
        collate_fn=_as_it_is,
        pin_memory=loading.pin_memory and torch.accelerator.is_available(),
        worker_init_fn=_begin,
        generator=torch.Generator(),  # or else starting a loader would draw from the model's
    )
    with _signals_held():
        iterator = iter(loader)
    try:
        while True:
            try:
                data = next(iterator)
            except StopIteration:
                return
            except MeshwrightError as error:
                raise type(error)(_own_words(error)) from None
            yield data
            del data  # a batch is not kept alive while the next one is waited for
    finally:
        del iterator


def _as_it_is(data: Any) -> Any:
    return data


def _own_words(error: MeshwrightError) -> str:
    """Torch puts the worker's whole traceback into the message; its last line is what the user is told."""
    text = str(error).strip()
    return text.rpartition("\n")[2].partition(": ")[2] if "Original Traceback" in text else text


@contextmanager
def _signals_held() -> Iterator[None]:
    """Holds signals back while workers start: they inherit that, so none is hit before it can ignore them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(worker: int) -> None:
    """Runs first in a worker; torch has limited it to one thread by then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigtimedwait"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    else:  # macOS cannot tell who sent a signal: better to lose a worker than to keep one that nothing ends
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    rank = parent_process()
    assert rank is not None
    threading.Thread(target=_watch, args=(rank.pid,), daemon=True).start()


def _watch(rank: int | None) -> None:
    """Ends the worker when its rank is gone or asks for it. SIGTERM from anyone else is ignored.

    Torch and multiprocessing end a busy worker, and every worker at the rank's exit, by SIGTERM and then wait
    for it: a worker that ignored that one as well would keep its rank from ending.
    """
    while os.getppid() == rank:
        if hasattr(signal, "sigtimedwait"):
            caught = signal.sigtimedwait({signal.SIGTERM}, _WATCH_S)
            if caught is not None and caught.si_pid == rank:
                break
        else:
            threading.Event().wait(_WATCH_S)
    os._exit(0)  # not sys.exit: the main thread may be anywhere, also in a pipe that nobody reads any more

"""Checks that tests leave no process, no segment of shared memory and no temporary file behind."""

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from pathlib import Path

from meshwright.processes.local import fork_server
from tests.forking.forked import server_ids
from tests.ranks import shared_rank_ids
from validation.bench.faults.leftovers import descendants, find_leftovers

_PR_SET_CHILD_SUBREAPER = 36
_SHARED_MEMORY = Path("/dev/shm")


def adopt_orphans() -> None:
    """Makes this process the parent of those whose own parent has died, so that they are found among its
    descendants."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextmanager
def leaving_nothing(temporary: Path | None = None) -> Iterator[None]:
    """Raises an AssertionError if processes that are started within the context still run some seconds after it, or if
    there is a segment of shared memory of theirs, or a file in the folder `temporary`, if it is given. Fork servers and
    ranks that tests share may go on, and torch's processes that compile kernels are ended here."""
    before, segments = descendants(os.getpid()), _segments()
    yield
    if (compiler := sys.modules.get("torch._inductor.async_compile")) is not None:
        compiler.shutdown_compile_workers()
    kept, tracker = fork_server._kept, vars(resource_tracker._resource_tracker)  # both end with this process
    shared = {*server_ids(), *shared_rank_ids(), *([kept.server._end.pid] if kept else []), tracker["_pid"]}
    started = {process for process in descendants(os.getpid()) - before if process.pid not in shared}
    left = find_leftovers(started, temporary)
    left += [f"segment {name} of a dead process is left" for name in _segments() - segments if _is_of_dead(name)]
    assert not left, "\n".join(left)


def _segments() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()} if _SHARED_MEMORY.exists() else set()


def _is_of_dead(name: str) -> bool:
    """Whether the name of a segment has the id of a process, as torch writes it, and there is no such process."""
    match = re.match(r"torch_(\d+)_", name)
    return match is not None and not Path(f"/proc/{match[1]}").exists()

"""`BackgroundSaver`: saves checkpoints while training goes on.

`begin` copies what this rank writes to memory of its own, and returns. A thread then writes that memory to the disk and
publishes the checkpoint, as save.py describes it. Training waits for the copy, and for the previous checkpoint if that
is not published yet. A rank that is killed before the checkpoint is published leaves the previous one as it is.

The threads of the ranks exchange messages through a process group of their own, because two threads must not use one
group. The memory is kept for the next checkpoint: memory that is used for the first time takes longer to write to.
"""

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.checkpoint.agreement import from_first_rank, gather_results
from meshwright.checkpoint.save import Division, StartedSave, complete_save, start_save, write_share
from meshwright.checkpoint.state import State
from meshwright.checkpoint.writer import copy_pieces, objects_as_json, write_copied
from meshwright.errors import StorageError
from meshwright.files.storage import has_space

_LONGEST_WAIT = timedelta(days=30)  # for ranks that write slowly, or wait for space on the disk
_POLL_S = 1.0


@dataclass(frozen=True)
class PublishedSave:
    """A checkpoint that was saved, and the seconds from the call of `begin` until it was published."""

    path: Path
    seconds: float


class BackgroundSaver:
    """Saves one checkpoint at a time. All ranks make one together, and call `begin` and `finish` together; `finish` has
    to be called before the next `begin`."""

    def __init__(
        self,
        pinned: bool = False,
        on_full: Literal["stop", "wait"] = "stop",
        tell: Callable[[str], None] = print,
        copies: bool = True,
    ) -> None:
        """`pinned`: tensors are on a GPU. With `on_full="wait"`, a checkpoint waits for space on a full disk; `tell`
        then tells the user, on rank 0. Without `copies`, `begin` writes the state itself, and returns when that is
        published."""
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if is_alone else dist.new_group(backend="gloo", timeout=_LONGEST_WAIT)
        self._pinned = pinned
        self._on_full = on_full
        self._tell = tell
        self._copies = copies
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._division: Division | None = None
        self._thread: threading.Thread | None = None
        self._published: PublishedSave | None = None
        self._error: BaseException | None = None

    def begin(
        self,
        state: State,
        final: Path,
        step: int,
        about: dict[str, Any],
        *,
        prepare: Callable[[], None] = lambda: None,
        examine: Callable[[Collection[str]], str | None] = lambda keys: None,
        published: Callable[[], None] = lambda: None,
    ) -> str | None:
        """Copies the state, and begins to save it to the folder `final` in another thread; without copies, it is saved
        when this returns. Rank 0 calls `prepare` first, and `published` once the checkpoint is complete. Each rank
        calls `examine` with the keys that it writes. If that returns a text on any rank, nothing is saved, and all
        ranks return the first such text."""
        assert self._thread is None, "finish has to be called first"
        began = time.perf_counter()
        started = start_save(state, final, step, about, self._division, prepare)
        self._division = started.division
        write = partial(write_share, state=state, share=started.division.share)

        def examine_and_copy() -> str | None:  # together, so that no rank saves if the copy of another one fails
            nonlocal write
            problem = examine(dict.fromkeys(piece[0] for piece in started.division.share.pieces))
            if problem is None and self._copies:
                write = partial(_write_copy, *self._copy(state, started))
            return problem

        for problem in gather_results(examine_and_copy):
            if problem is not None:
                return str(problem)
        if not self._copies:
            self._save(started, write, published, began)
            return None
        # A daemon, so that a rank that fails can exit; a run that ends waits for the thread.
        self._thread = threading.Thread(
            target=self._save, args=(started, write, published, began), name="checkpoint", daemon=True
        )
        self._thread.start()
        return None

    def finish(self, limit_s: float | None = None) -> PublishedSave | None:
        """Waits until the last checkpoint is published, but not longer than `limit_s`; None means no limit. Returns it
        if this is the first call after that, and raises the error if it could not be saved."""
        if self._thread is not None:
            self._thread.join(limit_s)
            if self._thread.is_alive():
                return None
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error
        published, self._published = self._published, None
        return published

    def _copy(self, state: State, started: StartedSave) -> tuple[Tensor, dict[str, Any]]:
        share = started.division.share
        size = share.size
        if self._memory.numel() < size:
            self._memory = torch.empty(0, dtype=torch.uint8)  # frees the old memory first
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned, device="cpu")
        file = self._memory[:size]
        copy_pieces(state, share, file)
        return file, objects_as_json(state, share.objects)

    def _save(
        self,
        started: StartedSave,
        write: Callable[[Path], dict[str, Any]],
        published: Callable[[], None],
        begin: float,
    ) -> None:
        try:
            self._complete(started, write)
            from_first_rank(published, self._group)
            self._published = PublishedSave(started.final, time.perf_counter() - begin)
        except BaseException as error:  # `finish` raises it
            self._error = error

    def _complete(self, started: StartedSave, write: Callable[[Path], dict[str, Any]]) -> None:
        """Writes and publishes the checkpoint. With `on_full="wait"` it waits for space on a full disk, and tries
        again."""
        while True:
            try:
                return complete_save(started, write, self._group)
            except StorageError as error:
                if self._on_full != "wait":
                    raise
                problem = error
            from_first_rank(partial(self._wait_for_space, started, problem), self._group)

    def _wait_for_space(self, started: StartedSave, problem: StorageError) -> None:
        folder, needed = started.final.parent, started.size
        if has_space(folder, needed):  # then something else is wrong with the disk
            raise problem
        self._tell(f"the checkpoint of step {started.step} waits for space: {problem}")
        while not has_space(folder, needed):
            time.sleep(_POLL_S)


def _write_copy(copy: Tensor, objects: dict[str, Any], path: Path) -> dict[str, Any]:
    """Writes the copy of this rank's pieces. Returns what `write_share` returns."""
    return {"checksum": write_copied(path, copy).model_dump() if copy.numel() else None, "objects": objects}

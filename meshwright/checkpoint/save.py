"""Writes a checkpoint to a temporary folder and publishes it by a rename. A checkpoint is complete, with the checksums
of all its files, or it does not exist.

What happens when a rank dies inside a save:

- While ranks write (`write_pieces`) or gather checksums, the other ranks cannot finish the collective: they fail, or
  the launcher kills them. Only `.writing-step-…` exists. It has no manifest, and nothing reads it.
- When rank 0 dies before the rename in `_publish`, `.writing-step-…` may be complete and have a manifest, but nothing
  reads it, and `step-…` does not exist. When rank 0 dies after the rename, `step-…` is complete.
- When a checkpoint of the same name is replaced, the two names are exchanged in one atomic operation, and the old
  checkpoint is deleted after that. On systems that cannot exchange names, the old one is renamed to `.trash-step-…`
  first; a rank 0 that dies between these two renames leaves no checkpoint of that name.
- The restarted run removes `.writing-*` and `.trash-*` (`clear_unfinished`) and resumes from the newest checkpoint with
  right checksums (`find_newest_valid` in load.py): the previous one, or this one if it was renamed already.

When a rank cannot write because the disk is full or the folder is gone, or fails in another way, all ranks raise the
same `MeshwrightError`, and `.writing-step-…` is removed.

`tests/checkpoint/test_save.py` kills saves and deletions, `tests/train/runs/test_faults.py` whole runs.
"""

import ctypes
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.index import INDEX, Index, parse_index
from meshwright.checkpoint.manifest import FileChecksum, Manifest, checkpoint_name, file_checksum, write_manifest
from meshwright.checkpoint.state import State
from meshwright.checkpoint.writer import WritePlan, describe, file_name, objects_as_json, plan_files, write_pieces
from meshwright.errors import CheckpointError, InputError, MeshwrightError, StorageError
from meshwright.exchange import all_gather_values, broadcast_value
from meshwright.files.storage import require_space, write_atomically, writing

WRITING = ".writing-"
TRASH = ".trash-"
_FILE_OF_CHECKPOINT = re.compile(r"manifest\.json|index\.json|rank-\d+\.bin|\.metadata|__\d+_\d+\.distcp|\..*\.new")

# Arguments of Linux's renameat2, see its manual page.
_WORKING_FOLDER = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


def save(state: State, folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to `folder/step-…`, as `save_at` does."""
    return save_at(state, folder / checkpoint_name(step), step, about)


def save_at(state: State, final: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to the folder `final`, and returns that path once the checkpoint is published. All ranks call
    this together, and each rank writes its shards."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    _on_first_rank(lambda: _refuse_other_folder(final))
    temporary = final.parent / f"{WRITING}{final.name}"
    plan = plan_files(_gather(lambda: describe(state)))
    _on_first_rank(lambda: _prepare(temporary, sum(plan.bytes_of_rank)))
    try:
        written = _gather(lambda: _write_share(temporary, state, plan, rank))
        _on_first_rank(lambda: _complete(temporary, final, plan, written, step, about))
    except MeshwrightError:  # raised on every rank, so none is still writing
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def prune(folder: Path, keep: int, newest: str, also: str | None = None) -> None:
    """Deletes old checkpoints, but not the last `keep` of those up to the one named `newest`, and not the one named
    `also`. Checkpoints after `newest` are damaged. They stay and are not counted, because otherwise a good checkpoint
    would be deleted in their place. One rank calls this."""
    for old in sorted(path for path in folder.glob("step-*") if path.name <= newest)[:-keep]:
        if old.name != also:
            _discard(old)


def clear_unfinished(folder: Path) -> None:
    """Removes what a killed run left half written or half deleted. One rank calls this."""
    for pattern in (f"{WRITING}*", f"{TRASH}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _refuse_other_folder(final: Path) -> None:
    """Raises an `InputError` if something else than a checkpoint is in the way: replacing it would delete it."""
    if not os.path.lexists(final):
        return
    files = [path.name for path in final.iterdir()] if final.is_dir() else [""]
    if not all(_FILE_OF_CHECKPOINT.fullmatch(name) for name in files):
        raise InputError(f"{final} exists and is not a checkpoint: save to a path that does not exist")


def _prepare(temporary: Path, needed: int) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    require_space(temporary.parent, needed)
    with writing(temporary.parent, needed):
        temporary.mkdir(parents=True)


def _write_share(temporary: Path, state: State, plan: WritePlan, rank: int) -> dict[str, Any]:
    """Writes this rank's file, if it has any pieces. Returns its size and checksum, and the objects of this rank."""
    objects = objects_as_json(state, plan.objects[rank])
    if not plan.pieces[rank]:
        return {"checksum": None, "objects": objects}
    checksum = write_pieces(temporary / file_name(rank), state, plan.pieces[rank], plan.bytes_of_rank[rank])
    return {"checksum": checksum.model_dump(), "objects": objects}


def _complete(
    temporary: Path, final: Path, plan: WritePlan, written: list[dict[str, Any]], step: int, about: dict[str, Any]
) -> None:
    """Writes index and manifest, and publishes the checkpoint. `written` is what `_write_share` returned on each
    rank."""
    index = Index(
        tensors=plan.tensors, objects={key: value for share in written for key, value in share["objects"].items()}
    )
    text = index.model_dump_json()
    parse_index(text, final)  # what cannot be read again must not be published
    write_atomically(temporary / INDEX, text)
    files = {
        file_name(rank): FileChecksum.model_validate(share["checksum"])
        for rank, share in enumerate(written)
        if share["checksum"]
    }
    files[INDEX] = file_checksum(temporary / INDEX)
    write_manifest(temporary, Manifest(step=step, files=files, about=about))
    with writing(final):
        _publish(temporary, final)


def _gather(compute: Callable[[], Any]) -> list[Any]:
    """Returns what `compute` returns on each rank. If it raises an exception on any rank, every rank raises the first
    one, as a `MeshwrightError`."""
    value, error = _attempt(compute)
    results = all_gather_values([value, _description(error)])
    for _, problem in results:
        _raise(problem, error)
    return [value for value, _ in results]


def _on_first_rank(act: Callable[[], None]) -> None:
    """Calls `act` on rank 0. If it raises an exception, every rank raises it as a `MeshwrightError`."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    _, error = _attempt(act) if is_first else (None, None)
    _raise(broadcast_value(_description(error)), error)


def _attempt(compute: Callable[[], Any]) -> tuple[Any, MeshwrightError | None]:
    """Returns what `compute` returns and None, or None and the exception that it raises. An exception that stayed on
    one rank would leave the others waiting."""
    try:
        return compute(), None
    except MeshwrightError as error:
        return None, error
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        problem = CheckpointError(f"the checkpoint cannot be saved: {type(error).__name__}: {message}")
        problem.__cause__ = error
        return None, problem


def _description(error: MeshwrightError | None) -> list[str] | None:
    return None if error is None else [type(error).__name__, str(error)]


def _raise(description: list[str] | None, error: MeshwrightError | None) -> None:
    """Raises the error that is described, if there is one. `error` is that of this rank, or None."""
    if description is None:
        return
    if error is not None and str(error) == description[1]:
        raise error
    kinds = {kind.__name__: kind for kind in (InputError, StorageError)}
    raise kinds.get(description[0], CheckpointError)(description[1])


def _publish(temporary: Path, final: Path) -> None:
    """Gives the complete checkpoint its name. A checkpoint of that name, a damaged one of the same step or one that a
    user replaces, is deleted after that."""
    _sync_folder(temporary)
    trash = _trash(final)
    if not final.exists():
        temporary.rename(final)
    elif _exchange(temporary, final):
        temporary.rename(trash)
    else:
        final.rename(trash)
        temporary.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(trash, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Exchanges the names of two folders in one atomic operation. Returns False where the system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (OSError, AttributeError):
        return False
    succeeded: bool = renameat2(_WORKING_FOLDER, bytes(first), _WORKING_FOLDER, bytes(second), _RENAME_EXCHANGE) == 0
    return succeeded


def _discard(path: Path) -> None:
    """Renames a checkpoint before it is deleted, so that a kill in between leaves no half checkpoint of that name."""
    trash = _trash(path)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _trash(path: Path) -> Path:
    """Returns the name under which a checkpoint is deleted, after removing what an interrupted deletion left there."""
    trash = path.parent / f"{TRASH}{path.name}"
    shutil.rmtree(trash, ignore_errors=True)
    return trash


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

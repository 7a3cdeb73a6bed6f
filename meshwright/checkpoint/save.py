"""Writes a checkpoint to a temporary folder and publishes it by a rename. A checkpoint is complete, with the checksums
of all its files, or it does not exist.

What happens when a rank dies inside a save:

- While ranks write (`dcp.save`) or gather checksums, the other ranks cannot finish the collective: they fail, or the
  launcher kills them. Only `.writing-step-…` exists. It has no manifest, and nothing reads it.
- When rank 0 dies before the rename in `_publish`, `.writing-step-…` may be complete and have a manifest, but nothing
  reads it, and `step-…` does not exist. When rank 0 dies after the rename, `step-…` is complete.
- When a checkpoint of the same name is replaced, the two names are exchanged in one atomic operation, and the old
  checkpoint is deleted after that. On systems that cannot exchange names, the old one is renamed to `.trash-step-…`
  first; a rank 0 that dies between these two renames leaves no checkpoint of that name.
- The restarted run removes `.writing-*` and `.trash-*` (`clear_unfinished`) and resumes from the newest checkpoint with
  right checksums (`find_newest_valid` in load.py): the previous one, or this one if it was renamed already.

`tests/checkpoint/test_save.py` kills saves and deletions, `tests/train/runs/test_faults.py` whole runs.
"""

import ctypes
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.chunks import SavePlanner
from meshwright.checkpoint.manifest import FileChecksum, Manifest, file_checksum, write_manifest
from meshwright.checkpoint.state import State

WRITING = ".writing-"
TRASH = ".trash-"

# Arguments of Linux's renameat2, see its manual page.
_WORKING_FOLDER = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


def save(state: State, folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to `folder/step-…`, as `save_at` does."""
    return save_at(state, folder / f"step-{step:08d}", step, about)


def save_at(state: State, final: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to the folder `final`, and returns that path once the checkpoint is published. All ranks call
    this together, and each rank writes its shards."""
    is_alone = not dist.is_initialized()
    rank = 0 if is_alone else dist.get_rank()
    temporary = final.parent / f"{WRITING}{final.name}"
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    if not is_alone:
        dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # DCP warns where a single process saves without a process group
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(temporary, sync_files=True),
            planner=SavePlanner(),
            no_dist=is_alone,
        )
    # Each rank computes the checksums of the files it wrote, so that reading them back is spread over the ranks.
    local_files = {path.name: file_checksum(path) for path in temporary.glob(f"__{rank}_*")}
    files_of_ranks = _gather(local_files)
    if rank == 0:
        files = {name: checksum for of_rank in files_of_ranks for name, checksum in of_rank.items()}
        files[".metadata"] = file_checksum(temporary / ".metadata")
        write_manifest(temporary, Manifest(step=step, files=files, about=about))
        _publish(temporary, final)
    if not is_alone:
        dist.barrier()
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


def _gather(local_files: dict[str, FileChecksum]) -> list[dict[str, FileChecksum]]:
    """The files of all ranks on rank 0, and an empty list on the others."""
    if not dist.is_initialized():
        return [local_files]
    files_of_ranks: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(local_files, files_of_ranks)
    return files_of_ranks or []


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

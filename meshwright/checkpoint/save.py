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
import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright.checkpoint.agreement import from_first_rank, gather_results, on_all_ranks
from meshwright.checkpoint.contents import check_contents
from meshwright.checkpoint.index import INDEX, parse_index
from meshwright.checkpoint.manifest import (
    FileChecksum,
    Manifest,
    checkpoint_name,
    checkpoints_in,
    file_checksum,
    step_of,
    write_manifest,
)
from meshwright.checkpoint.reader import VerifiedCheckpoints
from meshwright.checkpoint.state import State
from meshwright.checkpoint.writer import (
    RankShare,
    WritePlan,
    describe,
    file_name,
    object_keys,
    objects_as_json,
    plan_files,
    read_share,
    share_to_text,
    write_pieces,
)
from meshwright.errors import CheckpointError, InputError, MeshwrightError
from meshwright.files.storage import require_space, write_atomically, writing
from meshwright.messages.plain_values import from_json

WRITING = ".writing-"
TRASH = ".trash-"
_FILE_OF_CHECKPOINT = re.compile(r"manifest\.json|index\.json|rank-\d+\.bin|\.metadata|__\d+_\d+\.distcp|\..*\.new")

# Arguments of Linux's renameat2, see its manual page.
_WORKING_FOLDER = -100  # AT_FDCWD
_RENAME_EXCHANGE = 2


def save(state: State, folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to `folder/step-…`, as `save_at` does. The folder has to exist: that of a run which was
    deleted meanwhile is not created again."""
    return _save(state, folder / checkpoint_name(step), step, about)


def save_at(state: State, final: Path, step: int, about: dict[str, Any]) -> Path:
    """Saves a checkpoint to the folder `final`, and returns that path once the checkpoint is published. Folders above
    it are created. All ranks call this together, and each rank writes its shards."""
    from_first_rank(lambda: _create_parents(final))
    return _save(state, final, step, about)


def _create_parents(final: Path) -> None:
    with writing(final.parent):
        final.parent.mkdir(parents=True, exist_ok=True)


def _save(state: State, final: Path, step: int, about: dict[str, Any]) -> Path:
    started = start_save(state, final, step, about)
    complete_save(started, lambda file: write_share(file, state, started.division.share))
    return final


@dataclass(frozen=True)
class Division:
    """What each rank writes of a state. `description` is what this rank has of it, as `describe` returns it. `share` is
    what this rank writes. `descriptions` of all ranks, and their `plan`, are empty on ranks other than 0."""

    description: str
    descriptions: list[str]
    plan: WritePlan
    share: RankShare


@dataclass(frozen=True)
class StartedSave:
    """A checkpoint for which the ranks have agreed on what each writes, and of which nothing is written yet."""

    final: Path
    step: int
    about: dict[str, Any]
    rank: int
    division: Division

    @property
    def temporary(self) -> Path:
        """The folder that gets its name `final` when all is written."""
        return self.final.parent / f"{WRITING}{self.final.name}"

    @property
    def size(self) -> int:
        """The bytes of all ranks' files; only rank 0 knows it."""
        return sum(share.size for share in self.division.plan.shares)


def start_save(
    state: State,
    final: Path,
    step: int,
    about: dict[str, Any],
    previous: Division | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> StartedSave:
    """Divides the state among the ranks. All ranks call this together. `previous` is how an earlier state was divided,
    or None on all ranks: a state of the same tensors and objects is divided in the same way, which takes less time.
    Rank 0 calls `prepare` before anything else."""
    rank = dist.get_rank() if dist.is_initialized() else 0

    def check_and_describe() -> str:
        if rank == 0:
            prepare()
            _refuse_other_folder(final)
        return describe(state)

    return StartedSave(final, step, about, rank, _divide(check_and_describe, rank, previous))


def complete_save(
    started: StartedSave, write: Callable[[Path], dict[str, Any]], group: dist.ProcessGroup | None = None
) -> None:
    """Writes and publishes a checkpoint. All ranks call this together. `write` writes this rank's file, and returns its
    checksum and the objects of this rank, as `write_share` does. `group` is as in `gather_results`."""
    temporary = started.temporary
    from_first_rank(lambda: _prepare(temporary, started.size), group)
    try:
        written = gather_results(lambda: write(temporary / file_name(started.rank)), group)
        from_first_rank(lambda: _complete(started, written), group)
    except MeshwrightError:  # raised on every rank, so none is still writing
        if started.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def check_savable(state: State) -> None:
    """Raises the same `MeshwrightError` on all ranks if the state of any rank holds anything that cannot be saved. All
    ranks call this together."""

    def check() -> None:
        describe(state)
        objects_as_json(state, object_keys(state))

    on_all_ranks(check)


def prune(folder: Path, keep: int, newest: str, *also: str | None, verified: VerifiedCheckpoints | None = None) -> None:
    """Deletes old checkpoints, but not the last `keep` good ones of those up to the one named `newest`, and not those
    named `also`. Damaged checkpoints are not counted, because otherwise a good one would be deleted in their place:
    those after `newest` stay, and so do those that are newer than the oldest one that is kept. `verified` remembers
    which ones were good. One rank calls this."""
    verified = verified or VerifiedCheckpoints()
    newest_step = step_of(newest)
    assert newest_step is not None
    old = [path for step, path in checkpoints_in(folder).items() if step <= newest_step]
    good = 0
    while old and good < keep:
        # Nothing can be deleted if as many as are kept, or fewer, are left; then they need not be verified.
        if good + len(old) <= keep:
            return
        good += verified.is_good(old.pop())
    for path in old:
        if path.name not in also:
            _discard(path)


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


def _divide(describe_state: Callable[[], str], rank: int, previous: Division | None) -> Division:
    """Returns what each rank writes. Only rank 0 reads the descriptions of all ranks, because that takes long for many
    tensors and ranks. A rank whose description is that of `previous` sends None instead of it."""
    description = ""

    def describe_change() -> str | None:
        nonlocal description
        description = describe_state()
        return None if previous is not None and previous.description == description else description

    changes = gather_results(describe_change)
    if previous is not None and all(change is None for change in changes):
        return previous
    descriptions: list[str] = []
    plan = WritePlan({}, [])

    def plan_on_first_rank() -> list[str]:
        nonlocal descriptions, plan
        unchanged = previous.descriptions if previous is not None else changes
        descriptions = [old if new is None else new for old, new in zip(unchanged, changes, strict=True)]
        plan = plan_files(descriptions)
        return [share_to_text(share) for share in plan.shares[1:]]

    shares_of_others = from_first_rank(plan_on_first_rank)
    share = plan.shares[0] if rank == 0 else read_share(shares_of_others[rank - 1])
    return Division(description, descriptions, plan, share)


def _prepare(temporary: Path, needed: int) -> None:
    shutil.rmtree(temporary, ignore_errors=True)
    require_space(temporary.parent, needed)
    with writing(temporary.parent, needed):
        temporary.mkdir()


def write_share(file: Path, state: State, share: RankShare) -> dict[str, Any]:
    """Writes this rank's file, if it has any pieces. Returns its size and checksum, and the objects of this rank."""
    objects = objects_as_json(state, share.objects)
    checksum = write_pieces(file, state, share).model_dump() if share.pieces else None
    return {"checksum": checksum, "objects": objects}


def _complete(started: StartedSave, written: list[dict[str, Any]]) -> None:
    """Writes index and manifest, and publishes the checkpoint. `written` is what `write` returned on each rank."""
    temporary, final = started.temporary, started.final
    objects = {key: value for share in written for key, value in share["objects"].items()}
    text = json.dumps({"tensors": started.division.plan.tensors, "objects": objects}, separators=(",", ":"))
    index = parse_index(text, final)  # what cannot be read again must not be published
    problem = check_contents(index.tensors, {key: from_json(value) for key, value in index.objects.items()})
    if problem is not None:
        raise CheckpointError(f"the state cannot be saved: {problem}")
    write_atomically(temporary / INDEX, text)
    files = {
        file_name(rank): FileChecksum.model_validate(share["checksum"])
        for rank, share in enumerate(written)
        if share["checksum"]
    }
    files[INDEX] = file_checksum(temporary / INDEX)
    write_manifest(temporary, Manifest(step=started.step, files=files, about=started.about))
    with writing(final):
        _publish(temporary, final)


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

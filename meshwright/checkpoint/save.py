"""Writes a checkpoint aside and publishes it by rename: it exists whole and verified, or not at all."""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from meshwright.checkpoint.manifest import File, Manifest, describe, write_manifest
from meshwright.checkpoint.pieces import SavePlanner
from meshwright.checkpoint.state import State

WRITING = ".writing-"
TRASH = ".trash-"


def save(state: State, folder: Path, step: int, about: dict[str, Any]) -> Path:
    """Every rank writes its part under `folder/step-…`; all return once the checkpoint is published."""
    return save_at(state, folder / f"step-{step:08d}", step, about)


def save_at(state: State, final: Path, step: int, about: dict[str, Any]) -> Path:
    alone = not dist.is_initialized()
    rank = 0 if alone else dist.get_rank()
    aside = final.parent / f"{WRITING}{final.name}"
    if rank == 0:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    if not alone:
        dist.barrier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a world of one saves without a process group is no news
        dcp.save(
            state,
            storage_writer=dcp.FileSystemWriter(aside, sync_files=True),
            planner=SavePlanner(),
            no_dist=alone,
        )
    # Each rank sums up what it wrote itself: reading back is spread over the ranks, as writing was.
    mine = {path.name: describe(path) for path in aside.glob(f"__{rank}_*")}
    parts = _gather(mine)
    if rank == 0:
        files = {name: file for part in parts for name, file in part.items()}
        files[".metadata"] = describe(aside / ".metadata")
        write_manifest(aside, Manifest(step=step, files=files, about=about))
        _publish(aside, final)
    if not alone:
        dist.barrier()
    return final


def prune(folder: Path, keep: int, newest: str, also: str | None = None) -> None:
    """Deletes all but the `keep` checkpoints up to the one called `newest`, and the one called `also`; called
    by one rank. Beyond `newest` lie only damaged ones: counting them would delete a good one in their place."""
    for old in sorted(path for path in folder.glob("step-*") if path.name <= newest)[:-keep]:
        if old.name != also:
            _discard(old)


def clear_unfinished(folder: Path) -> None:
    """Removes what a killed run left half written; called by one rank."""
    for pattern in (f"{WRITING}*", f"{TRASH}*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def _gather(mine: dict[str, File]) -> list[dict[str, File]]:
    if not dist.is_initialized():
        return [mine]
    parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, parts)
    return parts or []


def _publish(aside: Path, final: Path) -> None:
    _sync_folder(aside)
    if final.exists():  # a damaged one of the same step, or a user's `save` to the same place
        _discard(final)
    aside.rename(final)
    _sync_folder(final.parent)


def _discard(path: Path) -> None:
    """Renamed before it is deleted, so that a kill in between leaves no half checkpoint under its name."""
    trash = path.parent / f"{TRASH}{path.name}"
    shutil.rmtree(trash, ignore_errors=True)
    path.rename(trash)
    shutil.rmtree(trash, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

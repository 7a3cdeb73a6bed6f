"""`keep` and `best` never delete the only good checkpoint: random sequences of saves, of which some are the best so
far, of damages and of kills inside saves and deletions."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import checkpoint_name, checkpoints_in
from meshwright.checkpoint.reader import VerifiedCheckpoints
from meshwright.checkpoint.save import prune, save
from meshwright.train.output.checkpoints import BestCheckpoint, RunCheckpoints
from meshwright.train.output.folder import RunFolder
from meshwright.user.job_sections import Checkpoint
from tests.train.one_process import world

STATE: dict[str, Any] = {"model/weight": torch.arange(50.0), "schedule": None, "optimizer_groups": []}
# A save: whether it is the best so far, and before which operation of the file system a kill comes, if one does. Or the
# damage of one of the checkpoints.
SAVES = st.tuples(st.just("save"), st.booleans(), st.none() | st.integers(0, 12))
DAMAGES = st.tuples(st.just("damage"), st.integers(0, 5), st.sampled_from(["flip", "truncate", "delete"]))


class Killed(BaseException):
    """Stands for a kill: nothing handles it."""


def damage(checkpoint: Path, how: str) -> None:
    file = checkpoint / "rank-00000.bin"
    if not file.exists():
        return
    data = bytearray(file.read_bytes())
    file.unlink()
    if how == "flip" and data:  # it may have been truncated to nothing
        data[min(7, len(data) - 1)] ^= 1
    if how != "delete":
        file.write_bytes(data[: len(data) // 2] if how == "truncate" else data)


def good_ones(folder: Path) -> set[str]:
    verified = VerifiedCheckpoints()
    return {path.name for path in checkpoints_in(folder).values() if verified.is_good(path)}


def begin_run(run: Path, keep: int) -> RunCheckpoints:
    (run / "job.yaml").touch()
    checkpoints = RunCheckpoints(RunFolder(run), world(), Checkpoint(keep=keep, best="accuracy"))
    checkpoints.clear_unfinished()
    return checkpoints


def save_step(checkpoints: RunCheckpoints, step: int, best: BestCheckpoint | None, dies_before: int | None) -> bool:
    """Returns whether nothing was killed."""
    operations = {"count": 0}

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if operations["count"] == dies_before:
                raise Killed
            operations["count"] += 1
            return function(*args, **options)

        return call

    about = {"step": step, "position": [0, step], "seed": 0}
    with pytest.MonkeyPatch.context() as patch:
        for place, name in ((os, "fsync"), (Path, "rename"), (Path, "replace"), (Path, "mkdir"), (shutil, "rmtree")):
            patch.setattr(place, name, counted(getattr(place, name)))
        try:
            checkpoints.save(STATE, step, about, best)
        except Killed:
            return False
    return True


@settings(max_examples=60)
@given(keep=st.integers(1, 3), acts=st.lists(SAVES | DAMAGES, max_size=12))
def test_the_only_good_checkpoint_is_never_deleted(keep: int, acts: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "checkpoints"
        folder.mkdir()
        checkpoints, step, best = begin_run(Path(name), keep), 0, None
        for act in acts:
            present = sorted(path.name for path in checkpoints_in(folder).values())
            before = good_ones(folder)
            if act[0] == "damage":
                if present:
                    damage(folder / present[act[1] % len(present)], act[2])
                continue
            step += 1
            is_best = act[1]
            candidate = BestCheckpoint(step, float(step)) if is_best else best
            if save_step(checkpoints, step, candidate, act[2]):
                best = candidate
                after = good_ones(folder)
                assert checkpoint_name(step) in after
                newest = sorted((*before, checkpoint_name(step)))[-keep:]
                assert set(newest) <= after, "the newest good ones are kept"
                if best is not None:
                    assert (folder / "best").readlink().name == checkpoint_name(best.step)
                    assert (folder / "best").exists(), "the best one is kept"
            else:
                after = good_ones(folder)
                assert len(after) >= min(keep, len(before)), "a kill deletes none that would have been kept"
                checkpoints = begin_run(Path(name), keep)
                newest_valid = find_newest_valid(folder).manifest
                assert (newest_valid is None) == (not after)
                assert [path for path in folder.iterdir() if path.name.startswith((".writing", ".trash"))] == []


def test_damaged_ones_are_not_counted(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(STATE, tmp_path, step, {"step": step, "position": [0, step], "seed": 0})
    damage(tmp_path / checkpoint_name(4), "flip")
    damage(tmp_path / checkpoint_name(3), "delete")
    prune(tmp_path, 2, checkpoint_name(5))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [checkpoint_name(step) for step in (2, 3, 4, 5)]


def test_files_that_did_not_change_are_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2, 3):
        save(STATE, tmp_path, step, {"step": step, "position": [0, step], "seed": 0})
    verified = VerifiedCheckpoints()
    verified.note(tmp_path / checkpoint_name(3))
    assert verified.is_good(tmp_path / checkpoint_name(2))
    with monkeypatch.context() as patch:
        patch.setattr("meshwright.checkpoint.reader.verify", lambda folder: pytest.fail(f"{folder} is read again"))
        prune(tmp_path, 2, checkpoint_name(3), verified=verified)
    assert sorted(path.name for path in tmp_path.iterdir()) == [checkpoint_name(2), checkpoint_name(3)]
    damage(tmp_path / checkpoint_name(3), "flip")
    assert not verified.is_good(tmp_path / checkpoint_name(3))

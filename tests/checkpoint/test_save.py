"""A checkpoint exists whole or not at all, and any damage to it is found and named."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.load import newest_good
from meshwright.checkpoint.manifest import MANIFEST, verify
from meshwright.checkpoint.save import clear_unfinished, prune, save
from meshwright.errors import CheckpointError

STATE = {"model/weight": torch.arange(1000.0), "schedule": {"last_epoch": 3}}


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save(STATE, folder, step, {"step": step, "loss": float("nan"), "best": [1, float("inf")]})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_one_folder_with_a_manifest_of_all_its_files(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    assert names(tmp_path) == ["step-00000007"]
    manifest = verify(tmp_path / "step-00000007")
    assert manifest.step == 7
    assert {*manifest.files, MANIFEST} == set(names(tmp_path / "step-00000007"))


def test_numbers_that_are_none_survive_the_manifest(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    about = verify(tmp_path / "step-00000007").about
    assert about["loss"] != about["loss"]
    assert about["best"] == [1, float("inf")]


@pytest.mark.parametrize("dies_in", ["dcp.save", "describe", "write_manifest", "_publish"])
def test_a_save_that_dies_leaves_no_checkpoint_and_the_next_run_clears_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_in: str
) -> None:
    save_steps(tmp_path, 1)

    class Killed(BaseException):
        pass

    def die(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(f"{save_module.__name__}.{dies_in}", die)
        with pytest.raises(Killed):
            save_steps(tmp_path, 2)
    assert names(tmp_path) == [".writing-step-00000002", "step-00000001"]
    found = newest_good(tmp_path)
    assert found.path == tmp_path / "step-00000001"
    assert found.problems == ()
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    save_steps(tmp_path, 2)
    assert newest_good(tmp_path).path == tmp_path / "step-00000002"


def test_what_a_killed_save_left_behind_is_not_mixed_into_the_next(tmp_path: Path) -> None:
    aside = tmp_path / ".writing-step-00000001"
    aside.mkdir()
    (aside / "__0_9.distcp").write_text("of the killed one")
    save_steps(tmp_path, 1)
    verify(tmp_path / "step-00000001")
    assert not (tmp_path / "step-00000001" / "__0_9.distcp").exists()


def test_a_deletion_that_dies_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)

    def half(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            next(path.glob("*.distcp")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(save_module.shutil, "rmtree", half)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1, "step-00000002")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000002"]


def test_a_step_can_be_saved_again(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    flip(tmp_path / "step-00000001")
    save_steps(tmp_path, 1)
    verify(tmp_path / "step-00000001")
    assert names(tmp_path) == ["step-00000001"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, 2, "step-00000005", "step-00000002")
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    prune(tmp_path, 1, "step-00000004")
    assert names(tmp_path) == ["step-00000004", "step-00000005"], "what lies beyond is not counted"


# ---- damage


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.distcp"))


def flip(checkpoint: Path) -> None:
    content = bytearray(data_file(checkpoint).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(checkpoint).write_bytes(content)


def flip_metadata(checkpoint: Path) -> None:
    content = bytearray((checkpoint / ".metadata").read_bytes())
    content[-1] ^= 1
    (checkpoint / ".metadata").write_bytes(content)


def truncate(checkpoint: Path) -> None:
    data_file(checkpoint).write_bytes(data_file(checkpoint).read_bytes()[:-5])


def lose(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()


def lose_metadata(checkpoint: Path) -> None:
    (checkpoint / ".metadata").unlink()


def lose_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).unlink()


def cut_manifest(checkpoint: Path) -> None:
    text = (checkpoint / MANIFEST).read_text()
    (checkpoint / MANIFEST).write_text(text[: len(text) // 2])


def foreign_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_text(json.dumps({"step": "three"}))


def binary_manifest(checkpoint: Path) -> None:
    (checkpoint / MANIFEST).write_bytes(b"\xff\x00\xfe")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (flip, "__0_0.distcp does not have the checksum that its manifest says"),
        (flip_metadata, ".metadata does not have the checksum"),
        (truncate, "bytes, its manifest says"),
        (lose, "__0_0.distcp is missing"),
        (lose_metadata, ".metadata is missing"),
        (lose_manifest, "its manifest.json cannot be read"),
        (cut_manifest, "its manifest.json is damaged"),
        (foreign_manifest, "its manifest.json is damaged"),
        (binary_manifest, "its manifest.json cannot be read"),
        (shutil.rmtree, ""),
    ],
)
def test_damage_is_named_and_the_newest_good_one_used(
    tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    found = newest_good(tmp_path)
    assert found.path == tmp_path / "step-00000002"
    assert found.manifest is not None
    assert found.manifest.about["step"] == 2
    if words:
        assert len(found.problems) == 1
        assert words in found.problems[0]
        assert str(tmp_path / "step-00000003") in found.problems[0]
        with pytest.raises(CheckpointError):
            verify(tmp_path / "step-00000003")


def test_damage_to_all_of_them_is_told_of_each(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "step-00000001")
    lose(tmp_path / "step-00000002")
    found = newest_good(tmp_path)
    assert found.path is None
    assert ["step-00000002" in found.problems[0], "step-00000001" in found.problems[1]] == [True, True]


def test_nothing_saved_is_no_problem(tmp_path: Path) -> None:
    found = newest_good(tmp_path / "nowhere")
    assert (found.path, found.problems) == (None, ())

"""A checkpoint exists whole or not at all, and any damage to it is detected and named."""

import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.checkpoint import save as save_module
from meshwright.checkpoint.chunks import chunks_of
from meshwright.checkpoint.index import INDEX
from meshwright.checkpoint.load import find_newest_valid
from meshwright.checkpoint.manifest import MANIFEST, Manifest, write_manifest
from meshwright.checkpoint.reader import open_checkpoint, plan_transfers, transfer, verify
from meshwright.checkpoint.save import clear_unfinished, prune, save, save_at
from meshwright.errors import CheckpointError, InputError, StorageError
from meshwright.messages.plain_values import tensor_bytes

STATE = {"model/weight": torch.arange(1000.0), "schedule": {"last_epoch": 3}, "optimizer_groups": []}


def save_steps(folder: Path, *steps: int) -> None:
    for step in steps:
        save(STATE, folder, step, about(step))


def about(step: int) -> dict[str, Any]:
    return {"step": step, "position": [0, step], "seed": 0, "loss": float("nan"), "best": [1, float("inf")]}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_is_one_folder_with_a_manifest_of_all_its_files(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    assert names(tmp_path) == ["step-00000007"]
    manifest = verify(tmp_path / "step-00000007")
    assert manifest.step == 7
    assert {*manifest.files, MANIFEST} == set(names(tmp_path / "step-00000007"))


def test_nan_and_inf_survive_the_manifest(tmp_path: Path) -> None:
    save_steps(tmp_path, 7)
    read = verify(tmp_path / "step-00000007").about
    assert read["loss"] != read["loss"]
    assert read["best"] == [1, float("inf")]


@pytest.mark.parametrize("dies_in", ["write_pieces", "write_atomically", "write_manifest", "_publish"])
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
    newest = find_newest_valid(tmp_path)
    assert newest.path == tmp_path / "step-00000001"
    assert newest.problems == ()
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000001"]
    save_steps(tmp_path, 2)
    assert find_newest_valid(tmp_path).path == tmp_path / "step-00000002"


def test_files_of_a_killed_save_do_not_get_into_the_next_one(tmp_path: Path) -> None:
    temporary = tmp_path / ".writing-step-00000001"
    temporary.mkdir()
    (temporary / "rank-00009.bin").write_text("of the killed save")
    save_steps(tmp_path, 1)
    verify(tmp_path / "step-00000001")
    assert not (tmp_path / "step-00000001" / "rank-00009.bin").exists()


def test_a_deletion_that_dies_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_steps(tmp_path, 1, 2)

    def delete_one_file_and_die(path: Path, ignore_errors: bool = False) -> None:
        if path.exists():
            next(path.glob("*.bin")).unlink()
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(save_module.shutil, "rmtree", delete_one_file_and_die)
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


@pytest.mark.parametrize("dies_at", range(6))
def test_replacing_a_checkpoint_always_leaves_a_complete_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies_at: int
) -> None:
    """Whichever rename or deletion it dies at: the names of the old and the new one are exchanged at once."""
    save_steps(tmp_path, 1)
    monkeypatch.setattr(save_module, "_publish", lambda *_: None)
    save_steps(tmp_path, 1)
    monkeypatch.undo()
    calls = iter(range(6))

    def dying(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            if next(calls) == dies_at:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        return call

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(Path, "rename", dying(Path.rename))
        patch.setattr(save_module.shutil, "rmtree", dying(shutil.rmtree))
        patch.setattr(save_module, "_sync_folder", dying(lambda _: None))
        save_module._publish(tmp_path / ".writing-step-00000001", tmp_path / "step-00000001")
    verify(tmp_path / "step-00000001")
    clear_unfinished(tmp_path)
    assert names(tmp_path) == ["step-00000001"]


def test_a_checkpoint_is_replaced_where_the_system_cannot_exchange_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_module, "_exchange", lambda *_: False)
    save_steps(tmp_path, 1, 1)
    verify(tmp_path / "step-00000001")
    assert names(tmp_path) == ["step-00000001"]


def test_pruning_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3, 4, 5)
    prune(tmp_path, 2, "step-00000005", "step-00000002")
    assert names(tmp_path) == ["step-00000002", "step-00000004", "step-00000005"]
    prune(tmp_path, 1, "step-00000004")
    assert names(tmp_path) == ["step-00000004", "step-00000005"], "newer ones than the newest valid one are not counted"


def test_steps_of_more_than_eight_digits_are_newer(tmp_path: Path) -> None:
    save_steps(tmp_path, 99_999_998, 99_999_999, 100_000_000)
    (tmp_path / "step-99999999 (copy)").mkdir()
    newest = find_newest_valid(tmp_path)
    assert (newest.path, newest.problems) == (tmp_path / "step-100000000", ())
    assert find_newest_valid(tmp_path, before=100_000_000).path == tmp_path / "step-99999999"
    prune(tmp_path, 2, "step-100000000")
    assert names(tmp_path) == ["step-100000000", "step-99999999", "step-99999999 (copy)"]


# ---- damage


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*.bin"))


def flip(checkpoint: Path) -> None:
    content = bytearray(data_file(checkpoint).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(checkpoint).write_bytes(content)


def flip_index(checkpoint: Path) -> None:
    content = bytearray((checkpoint / INDEX).read_bytes())
    content[-1] ^= 1
    (checkpoint / INDEX).write_bytes(content)


def truncate(checkpoint: Path) -> None:
    data_file(checkpoint).write_bytes(data_file(checkpoint).read_bytes()[:-5])


def lose(checkpoint: Path) -> None:
    data_file(checkpoint).unlink()


def lose_index(checkpoint: Path) -> None:
    (checkpoint / INDEX).unlink()


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
    ("damage", "message"),
    [
        (flip, "rank-00000.bin does not have the checksum that its manifest says"),
        (flip_index, "index.json does not have the checksum"),
        (truncate, "bytes, its manifest says"),
        (lose, "rank-00000.bin is missing"),
        (lose_index, "index.json is missing"),
        (lose_manifest, "its manifest.json cannot be read"),
        (cut_manifest, "its manifest.json is damaged"),
        (foreign_manifest, "its manifest.json is damaged"),
        (binary_manifest, "its manifest.json is damaged"),
        (shutil.rmtree, ""),
    ],
)
def test_damage_is_named_and_the_newest_valid_checkpoint_used(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path / "step-00000003")
    newest = find_newest_valid(tmp_path)
    assert newest.path == tmp_path / "step-00000002"
    assert newest.manifest is not None
    assert newest.manifest.about["step"] == 2
    if message:
        assert len(newest.problems) == 1
        assert message in newest.problems[0]
        assert str(tmp_path / "step-00000003") in newest.problems[0]
        with pytest.raises(CheckpointError):
            verify(tmp_path / "step-00000003")


def test_damage_to_every_checkpoint_is_named(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2)
    flip(tmp_path / "step-00000001")
    lose(tmp_path / "step-00000002")
    newest = find_newest_valid(tmp_path)
    assert newest.path is None
    assert ["step-00000002" in newest.problems[0], "step-00000001" in newest.problems[1]] == [True, True]


def test_a_folder_without_checkpoints_is_no_error(tmp_path: Path) -> None:
    newest = find_newest_valid(tmp_path / "nowhere")
    assert (newest.path, newest.problems) == (None, ())


UNUSUAL: dict[str, torch.Tensor] = {
    "one_of_a_column": torch.arange(12.0).view(3, 4)[1:2, 2],
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "expanded": torch.ones(1, 3).expand(4, 3),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "bfloat16": torch.arange(5).bfloat16(),
    "float8": torch.arange(5).float().to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False]),
    "number": torch.tensor(7),
    "empty": torch.empty(0, 3),
}


def test_tensors_of_every_kind_and_layout_are_read_as_they_were(tmp_path: Path) -> None:
    save({**STATE, **{f"model/{name}": value for name, value in UNUSUAL.items()}}, tmp_path, 1, about(1))
    folder = tmp_path / "step-00000001"
    with open_checkpoint(folder, verify(folder)) as reader:
        for name, value in UNUSUAL.items():
            memory = torch.zeros(value.shape, dtype=value.dtype)
            for part in plan_transfers(reader, f"model/{name}", chunks_of(memory)):
                transfer(reader, part)
            assert torch.equal(tensor_bytes(memory), tensor_bytes(value)), name


def test_an_object_that_is_not_plain_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"schedule\['anneal'\] is a builtins.function, which cannot be saved"):
        save({**STATE, "schedule": {"anneal": about}}, tmp_path, 1, about(1))
    assert names(tmp_path) == []


def test_a_run_folder_that_was_deleted_is_not_created_again_but_folders_of_a_user_are(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="checkpoints"):
        save(STATE, tmp_path / "run" / "checkpoints", 1, about(1))
    assert names(tmp_path) == []
    assert save_at(STATE, tmp_path / "mine" / "last", 1, about(1)).is_dir()


def test_something_else_than_a_checkpoint_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "thesis.txt").write_text("important")
    (tmp_path / "file").write_text("important")
    for name in ("results", "file"):
        with pytest.raises(InputError, match="exists and is not a checkpoint"):
            save_at(STATE, tmp_path / name, 1, about(1))
    assert names(tmp_path) == ["file", "results"]
    assert (tmp_path / "results" / "thesis.txt").read_text() == "important"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"inner": value}
    return value


@pytest.mark.parametrize("value", [nested(300), "\ud800", 10**5000], ids=["deep", "half a surrogate", "long"])
def test_what_could_not_be_read_again_is_not_saved(tmp_path: Path, value: Any) -> None:
    with pytest.raises(CheckpointError):
        save({**STATE, "schedule": {"value": value}}, tmp_path, 1, about(1))
    assert names(tmp_path) == []


def test_a_pipe_instead_of_a_manifest_or_an_index_without_checksum_is_not_read(tmp_path: Path) -> None:
    save_steps(tmp_path, 1, 2, 3)
    (tmp_path / "step-00000003" / MANIFEST).unlink()
    os.mkfifo(tmp_path / "step-00000003" / MANIFEST)
    manifest = verify(tmp_path / "step-00000002")
    files = {name: checksum for name, checksum in manifest.files.items() if name != INDEX}
    write_manifest(tmp_path / "step-00000002", Manifest(step=2, files=files, about=manifest.about))
    newest = find_newest_valid(tmp_path)
    assert newest.path == tmp_path / "step-00000001"
    assert "is not a regular file" in newest.problems[0]
    assert "does not have index.json" in newest.problems[1]

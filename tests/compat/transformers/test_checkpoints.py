"""Checkpoints of `MeshwrightTrainer`: transformers loads them, and a training goes on from them under any plan."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="transformers' Trainer needs the package accelerate: pip install accelerate")

import torch
from safetensors.torch import save_file

from meshwright.compat.transformers.resume import check_checkpoint
from meshwright.errors import CheckpointError
from tests.compat.transformers.test_trainer import CLOSE, REPLICATE, SHARD, TENSOR
from tests.compat.transformers.trainers import loss_of_folder, train
from tests.ranks import RankPool
from tests.soaked import all_but

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}


def train_here(folder: Path, plan: Any = None, name: str = "llama", resume: Any = None, **options: Any) -> Any:
    return train(0, 1, name, plan, str(folder), 22, resume, options)


# `test_dropout_continues_in_a_resumed_training` has one of them without the soak.
@pytest.mark.soak
@pytest.mark.parametrize("plan", [REPLICATE, SHARD, TENSOR], ids=["replicate", "shard", "tensor"])
def test_killed_and_resumed_gives_the_same_losses(plan: Any, two: RankPool, tmp_path: Path) -> None:
    whole = train_here(tmp_path / "one")
    two.run(train, "llama", plan, str(tmp_path / "two"), 22, None, {**SAVING, "stop": 5})
    folder = tmp_path / "two" / "checkpoint-3"
    resumed = two.run(train, "llama", plan, str(tmp_path / "resumed"), 22, str(folder), {})[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], **CLOSE)  # the first three are in the saved state
    assert loss_of_folder(tmp_path / "resumed" / "final") == pytest.approx(loss_of_folder(tmp_path / "one" / "final"))
    # Transformers' own Trainer goes on from it, too.
    ours = train_here(tmp_path / "trainer", "trainer", resume=str(folder))
    assert ours["losses"] == pytest.approx(whole["losses"], **CLOSE)


def test_two_ranks_go_on_from_a_checkpoint_of_trainer(two: RankPool, tmp_path: Path) -> None:
    whole = train_here(tmp_path, "trainer", **SAVING)
    resumed = two.run(train, "llama", SHARD, str(tmp_path / "two"), 22, str(tmp_path / "checkpoint-6"), {})[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], **CLOSE)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("model.safetensors", "header"), ("optimizer.pt", "its end is missing"), ("trainer_state.json", "not JSON")],
)
def test_a_damaged_file_is_named(name: str, reason: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-3"
    for step in (3, 6):
        (tmp_path / f"checkpoint-{step}").mkdir()
    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.pt")
    (folder / "trainer_state.json").write_text('{"global_step": 3}')
    check_checkpoint(folder)
    (folder / name).write_bytes((folder / name).read_bytes()[:12])
    with pytest.raises(CheckpointError) as error:
        train_here(tmp_path / "again", resume=str(folder))
    assert str(error.value).startswith(f"{folder / name} is damaged (")
    assert reason in str(error.value)
    assert str(error.value).endswith(f"{tmp_path} has checkpoint-6")


def test_a_checkpoint_without_optimizer_is_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"has no optimizer\.pt: the optimizer and the schedule start anew"):
        check_checkpoint(tmp_path)


def test_dropout_continues_in_a_resumed_training(two: RankPool, tmp_path: Path) -> None:
    whole = two.run(train, "gpt2", SHARD, str(tmp_path), 22, None, SAVING)[0]
    resumed = two.run(train, "gpt2", SHARD, str(tmp_path / "again"), 22, str(tmp_path / "checkpoint-3"), {})[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], **CLOSE)
    # The output layer and the embedding are one weight, which is saved once.
    assert loss_of_folder(tmp_path / "final") == pytest.approx(loss_of_folder(tmp_path / "again" / "final"), **CLOSE)


def test_adapters_are_saved_as_peft_does_and_resumed(two: RankPool, tmp_path: Path) -> None:
    whole = two.run(train, "adapters", SHARD, str(tmp_path), 22, None, SAVING)[0]
    names = {file.name for file in (tmp_path / "checkpoint-3").iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    resumed = two.run(train, "adapters", SHARD, str(tmp_path / "again"), 22, str(tmp_path / "checkpoint-3"), {})[0]
    assert resumed["losses"] == pytest.approx(whole["losses"], **CLOSE)


@pytest.mark.parametrize("name", all_but({"llama"}, ["llama", "adapters"]))
def test_the_best_model_is_loaded_at_the_end(two: RankPool, tmp_path: Path, name: str) -> None:
    best: dict[str, Any] = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "eval_strategy": "steps",
        "eval_steps": 3,
    }
    whole = train_here(tmp_path / "one", "trainer", name, **SAVING, **best)
    result = two.run(train, name, SHARD, str(tmp_path / "two"), 22, None, {**SAVING, **best})[0]
    assert result["metrics"] == pytest.approx(whole["metrics"], **CLOSE)

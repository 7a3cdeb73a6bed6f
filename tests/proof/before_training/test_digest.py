"""Tests that a result is kept for the same code, shapes and kind of plan, and for nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.proof.before_training import kept
from meshwright.proof.before_training.decide import decide
from meshwright.proof.before_training.plan_kind import small_plan
from meshwright.proof.before_training.training import Training
from tests.proof.before_training import helper
from tests.proof.before_training.models import Blocks, training

CPU = torch.device("cpu")


def digest(subject: Training, **groups: object) -> str:
    plan = small_plan(Plan.model_validate({"axes": {"tensor": 2}} | groups))
    found = decide(subject, plan, CPU).digest
    assert found is not None
    return found


def test_weights_learning_rate_and_bucket_sizes_do_not_change_the_digest() -> None:
    first, second = training(), training(Blocks())
    with torch.no_grad():
        second.model.get_parameter("head.weight").mul_(2)
    second.optimizer.param_groups[0]["lr"] = 0.2
    assert digest(first) == digest(second, gradients={"bucket_bytes": 2**20}, compute={"threads": 1})


def other_function(x: Tensor) -> Tensor:
    result = x.tanh()
    assert result.shape == x.shape
    return result


def test_a_changed_function_of_another_file_changes_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(training())
    monkeypatch.setattr(helper, "activate", other_function)  # the same operators, by other code
    assert digest(training()) != before


def test_shapes_plans_and_optimizers_change_the_digest() -> None:
    subject = training()
    adam = replace(subject, optimizer=torch.optim.Adam(subject.model.parameters()))
    others = [digest(training(Blocks(7))), digest(training(Blocks(width=8).double())), digest(adam)]
    others += [digest(subject, axes={"tensor": 4}), digest(subject, memory={"recompute": "full"})]
    others += [digest(replace(subject, loss=nn.CrossEntropyLoss(label_smoothing=0.1)))]
    assert len({digest(subject), *others}) == len(others) + 1


def test_a_damaged_file_counts_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not kept.is_kept("a" * 64)
    assert kept.keep("a" * 64, "tensor 2", 1e-15, 2.0)
    assert kept.is_kept("a" * 64)
    (file,) = tmp_path.rglob("*.json")
    for damage in ("", "{", "[]", file.read_text().replace("true", "false"), file.read_text().replace("aa", "ab")):
        file.write_text(damage)
        assert not kept.is_kept("a" * 64)


def test_a_folder_that_cannot_be_written_keeps_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "meshwright").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert not kept.keep("a" * 64, "tensor 2", 1e-15, 2.0)

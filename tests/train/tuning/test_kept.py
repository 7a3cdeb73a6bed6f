"""A choice is kept for the same model, code, shapes, plan and versions, and damaged files count as none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Compute
from meshwright.train.tuning import kept
from meshwright.train.tuning.kept import KeptChoice, choice_file, code_of, load_choice, save_choice

COMPILED = KeptChoice(Compute(compile="model"), "measured 2 variants in 3 s", None)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def file_of(
    model: nn.Module | None = None, batch: Any = None, plan: Plan | None = None, others: dict[str, Any] | None = None
) -> Path:
    batch = (torch.zeros(4, 3), torch.zeros(4)) if batch is None else batch
    return choice_file(plan or Plan(), model or nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.1)), batch, others or {})


def test_a_choice_is_found_again() -> None:
    assert load_choice(file_of(), 60) is None
    save_choice(file_of(), COMPILED)
    assert load_choice(file_of(), 60) == COMPILED


def test_other_compute_fields_are_the_same_question() -> None:
    assert file_of(plan=Plan.model_validate({"compute": {"compile": "model"}})) == file_of()


class Doubled(nn.Linear):
    pass


@pytest.mark.parametrize(
    "other",
    [
        {"model": nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.2))},
        {"model": nn.Sequential(nn.Linear(3, 2).double(), nn.Dropout(0.1))},
        {"model": nn.Sequential(Doubled(3, 2), nn.Dropout(0.1))},
        {"batch": (torch.zeros(8, 3), torch.zeros(8))},
        {"plan": Plan.model_validate({"numerics": {"precision": "bf16"}})},
        {"plan": Plan.model_validate({"axes": {"replicate": 2}})},
        {"plan": Plan.model_validate({"compute": {"threads": 2}})},
        {"others": {"device": "another"}},
    ],
)
def test_another_model_batch_plan_or_device_is_another_question(other: dict[str, Any]) -> None:
    assert file_of(**other) != file_of()


@pytest.mark.parametrize("name", ["VERSION", "step_digest", "torch"])
def test_other_versions_are_another_question(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    before = file_of()
    if name == "torch":
        monkeypatch.setattr(torch, "__version__", "9.9")
    else:
        monkeypatch.setattr(kept, name, "0.0.0" if name == "VERSION" else lambda: "other")
    assert file_of() != before


def test_the_code_of_classes_without_a_file_counts() -> None:
    """As in a notebook, whose cells are no files."""

    def model(factor: int) -> nn.Module:
        names: dict[str, Any] = {"nn": nn, "__name__": "notebook"}
        lines = ["class Net(nn.Linear):", "    def forward(self, x):", f"        return x * {factor}"]
        exec("\n".join(lines), names)
        result: nn.Module = names["Net"](3, 2)
        return result

    assert file_of(model(2)) == file_of(model(2))
    assert file_of(model(2)) != file_of(model(3))


def test_losses_are_told_apart() -> None:
    assert code_of(nn.MSELoss()) != code_of(nn.MSELoss) != code_of(nn.L1Loss())
    assert code_of(nn.functional.mse_loss) != code_of(nn.functional.l1_loss)
    assert code_of(None) == code_of(None)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", "null", '{"compute": {"compile": "wrong"}, "line": "", "budget_s": 1}', "[" * 100_000]
)
def test_a_damaged_file_counts_as_none(text: str) -> None:
    save_choice(file_of(), COMPILED)
    file_of().write_text(text)
    assert load_choice(file_of(), 60) is None


def test_a_choice_within_a_smaller_budget_is_measured_again() -> None:
    save_choice(file_of(), KeptChoice(Compute(), "measured", 10.0))
    assert load_choice(file_of(), 5) is not None
    assert load_choice(file_of(), 11) is not None, "predictions of the same run differ a little"
    assert load_choice(file_of(), 21) is None


def test_a_cache_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.warns(UserWarning, match="until then the steps are timed at every start"):
        save_choice(blocked / "tuning" / "a.json", COMPILED)


def test_what_is_written_is_plain() -> None:
    save_choice(file_of(), COMPILED)
    assert set(json.loads(file_of().read_text())) == {"compute", "line", "budget_s"}

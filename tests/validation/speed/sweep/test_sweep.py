"""The sweep over models: two tiny models through the program itself, models that hang, crash and fail, and the rules by
which it goes on where it was stopped."""

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forking.forked import start
from validation.speed.sweep import __main__ as program
from validation.speed.sweep.__main__ import chosen_models, main
from validation.speed.sweep.forms import BY_HAND, FORMS, OURS, build_by_hand
from validation.speed.sweep.models.all_models import MODELS, TEN
from validation.speed.sweep.results import REPOSITORY, Setting, read_rows, with_row, write_rows

TWO = ("radiance_field", "two_towers")  # one with a loss beside it, one that returns its loss
QUICK = ("gpt2", "bert", "unet", "lstm", "graph_net", "recommender")


def run(module: str, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.soak
def test_two_tiny_models_are_measured_predicted_and_not_measured_again(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    arguments = (str(results), *TWO, "--tiny", "--device", "cpu")
    run("validation.speed.sweep", str(results), TWO[0], "--tiny", "--device", "cpu")
    first = read_rows(results)
    again = run("validation.speed.sweep", *arguments)
    assert f"{TWO[0]}: measured already" in again
    rows = read_rows(results)
    assert rows[:1] == first
    assert [row["model"] for row in rows] == list(TWO)
    for row in rows:
        assert list(row["forms"]) == list(FORMS)
        for figures in row["forms"].values():
            assert figures["step_s"] > 0, figures
            assert figures["first_step_s"] > 0
            assert figures["spread"] >= 0
        assert row["forms"][OURS]["plan"].startswith("one rank")
    run("validation.speed.sweep", str(results), TWO[0], "--tiny", "--predict")
    predicted = [row.get("predicted", {}) for row in read_rows(results)]
    assert predicted[0]["step_s"] > 0
    assert predicted[0]["memory_bytes"] > 0
    assert not predicted[1]


def test_models_that_hang_crash_or_fail_are_rows_with_reasons(nothing_left: None) -> None:
    printed, errors = start("tests.validation.speed.sweep.failing:main").communicate(timeout=240)
    assert printed, errors
    results = json.loads(printed.splitlines()[-1])
    reasons = {
        name: {form: figures["failure"] for form, figures in forms.items()} for name, forms in results.items() if forms
    }
    for form in BY_HAND:
        assert reasons["hangs"][form].startswith("stopped after 1 s while "), form
        assert reasons["crashes"][form] == "the process ended with exit code -9: the library has crashed"
        assert reasons["refuses"][form] == "ValueError: this model refuses"
    assert set(reasons["crashes"]) == set(reasons["hangs"]) == set(FORMS)
    assert "this model refuses" in reasons["refuses"][OURS]
    assert results["out of time"] is None, "the call has no row of a model that it did not finish"


def _setting(**changes: Any) -> Setting:
    values: dict[str, Any] = {"device": "GPU", "torch": "2", "digest": "ab", "tiny": False, "cold": False}
    return Setting(**values | changes)


def _row(**changes: Any) -> dict[str, Any]:
    return {"model": "a", "device": "GPU", "torch": "2", "digest": "ab", "tiny": False, "cold": False} | changes


def test_a_row_is_measured_again_when_the_step_or_the_machine_is_another() -> None:
    assert _setting().covers(_row())
    for name, value in (("device", "CPU"), ("torch", "3"), ("digest", "cd"), ("tiny", True)):
        assert not _setting().covers(_row(**{name: value})), name
    assert not _setting(cold=True).covers(_row())
    assert _setting(cold=False).covers(_row(cold=True))


def test_rows_replace_those_of_the_same_model_on_the_same_device(tmp_path: Path) -> None:
    rows = with_row([_row(), _row(model="b"), _row(device="CPU")], _row(digest="cd"))
    assert [(row["model"], row["device"], row["digest"]) for row in rows] == [
        ("b", "GPU", "ab"),
        ("a", "CPU", "ab"),
        ("a", "GPU", "cd"),
    ]
    file = tmp_path / "folder" / "rows.json"
    write_rows(file, rows)
    assert read_rows(file) == rows
    assert [one.name for one in file.parent.iterdir()] == ["rows.json"]


def test_shards_divide_the_models_and_ten_cover_the_kinds() -> None:
    def names(models: tuple[str, ...], ten: bool, shard: str) -> list[str]:
        return [case.name for case in chosen_models(Namespace(models=models, ten=ten, shard=shard))]

    assert len(MODELS) >= 45
    assert sorted(name for number in "123" for name in names((), False, f"{number}/3")) == sorted(MODELS)
    assert names((), True, "1/1") == list(TEN)
    assert len(TEN) == 10
    assert names(("bert", "unet"), False, "2/2") == ["unet"]
    libraries = [case.library for case in MODELS.values()]
    assert {name: libraries.count(name) >= 8 for name in set(libraries)} == dict.fromkeys(libraries, True)


@pytest.mark.parametrize("arguments", [["no_such_model"], ["--shard", "3/2"], ["--shard", "x"]])
def test_wrong_arguments_are_refused(arguments: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path / "results.json"), *arguments])


@pytest.mark.parametrize("name", QUICK)
def test_tiny_models_train_by_hand(name: str) -> None:
    _train_two_steps(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in MODELS if name not in QUICK and name != "fasterrcnn_resnet50"])
def test_all_tiny_models_train_by_hand(name: str) -> None:
    _train_two_steps(name)


def _train_two_steps(name: str) -> None:
    built = build_by_hand(MODELS[name], True, torch.device("cpu"), None)()
    for _ in range(2):
        assert torch.isfinite(built.step())


def test_a_call_without_time_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "_preload", lambda cases, compiles: {})
    monkeypatch.setattr(program, "_setting", lambda options: _setting())
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    results = tmp_path / "r.json"
    main([str(results), "lstm", "gru", "--tiny", "--device", "cpu", "--limit", "0"])
    assert "call again to measure lstm" in capsys.readouterr().out
    assert not results.exists()


def test_a_model_whose_library_is_missing_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_preload", lambda cases, compiles: {"timm": "timm is not installed"})
    monkeypatch.setattr(program, "_setting", lambda options: _setting())
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "0")
    main([str(tmp_path / "r.json"), "mixer_b_16", "--tiny", "--device", "cpu"])
    (row,) = read_rows(tmp_path / "r.json")
    assert row["failure"] == "not available: timm is not installed"
    assert (row["digest"], row["device"]) == ("ab", "GPU")

"""`meshwright prove` as scripts use it: its JSON and its exit code."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import CommandResult, run_in_process

JOB = Path("jobs/mnist.yaml")

FAULTY: dict[str, Any] = {
    "model": {"call": "tests.proof.cases:Faulty"},
    "data": {"train": {"call": "tests.proof.cases:Points"}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    "train": {"epochs": 1, "global_batch": 8},
    "plan": {"axes": {"replicate": 4}},
}


@pytest.fixture
def prove(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., CommandResult]:
    """Runs `meshwright prove` in this process, with these words after it."""
    return lambda *words: run_in_process(monkeypatch, capfd, ("prove", *words))


def test_the_default_job_is_proved(tmp_path: Path, prove: Callable[..., CommandResult]) -> None:
    settings = [f"output={tmp_path / 'runs'}", "train.global_batch=16", "plan.axes.replicate=2"]
    words = (option for setting in settings for option in ("--set", setting))
    result = prove(str(JOB), "--json", "--steps", "2", *words)
    assert result.exit_code == 0, result.stderr
    proof = json.loads(result.stdout.splitlines()[-1])
    assert (proof["equal"], proof["ranks"], proof["steps"], proof["first_difference"]) == (True, 2, 2, None)
    assert proof["checked"] == {"losses": 2, "gradients": 16, "norms": 2, "buffers": 0, "weights": 24}
    assert proof["max_relative_error"] <= proof["tolerance"] <= 1e-9
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mnist-proof-0001.json"]


def test_a_wrong_model_makes_it_exit_3(tmp_path: Path, prove: Callable[..., CommandResult]) -> None:
    job = tmp_path / "faulty.yaml"
    job.write_text(yaml.safe_dump({**FAULTY, "output": str(tmp_path / "runs")}))
    result = prove(str(job), "--ranks", "2", "--json")
    assert result.exit_code == 3, result.stderr
    proof = json.loads(result.stdout.splitlines()[-1])
    assert proof["equal"] is False
    assert proof["ranks"] == 2
    assert proof["shrunk"].startswith("replicate 4 to replicate 2")
    first = proof["first_difference"]
    assert (first["step"], first["parameter"], first["cause"]) == (1, "conv.weight", "scaled")
    assert first["explanation"].startswith("the gradients of conv.weight are 1.01 times those of one device")
    assert "wrong_samples" in first["ruled_out"]
    assert first["error"] == pytest.approx(0.01, rel=1e-3)
    saved = json.loads((tmp_path / "runs" / "faulty-proof-0001.json").read_text())
    rows = saved.pop("compared")["rows"]
    assert saved.pop("kind") == "proof"
    assert proof == {**saved, "file": str(tmp_path / "runs" / "faulty-proof-0001.json")}
    assert len(rows) >= sum(proof["checked"].values()), "the file has every compared value"


def test_a_wrong_job_leaves_no_files(tmp_path: Path, prove: Callable[..., CommandResult]) -> None:
    settings = [f"output={tmp_path / 'runs'}", "train.global_batch=1", "plan.axes.replicate=2"]
    result = prove(str(JOB), *(option for setting in settings for option in ("--set", setting)))
    assert result.exit_code == 2
    assert "global_batch is 1" in result.stderr
    assert not (tmp_path / "runs").exists()

"""`meshwright prove` as scripts use it: its JSON and its exit code."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

JOB = Path("jobs/mnist.yaml")

FAULTY: dict[str, Any] = {
    "model": {"call": "tests.proof.cases:Faulty"},
    "data": {"train": {"call": "tests.proof.cases:Points"}},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    "train": {"epochs": 1, "global_batch": 8},
    "plan": {"axes": {"replicate": 4}},
}


def prove(job: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "meshwright", "prove", str(job), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_the_default_job_is_proved(tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'runs'}", "train.global_batch=16", "plan.axes.replicate=2"]
    result = prove(JOB, "--json", "--steps", "2", *(option for setting in settings for option in ("--set", setting)))
    assert result.returncode == 0, result.stderr
    proof = json.loads(result.stdout.splitlines()[-1])
    assert (proof["equal"], proof["ranks"], proof["steps"], proof["first_difference"]) == (True, 2, 2, None)
    assert proof["checked"] == {"losses": 2, "gradients": 16, "norms": 2, "buffers": 0, "weights": 24}
    assert proof["max_relative_error"] <= proof["tolerance"] <= 1e-9
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["mnist-proof-0001.json"]


def test_a_wrong_model_makes_it_exit_3(tmp_path: Path) -> None:
    job = tmp_path / "faulty.yaml"
    job.write_text(yaml.safe_dump({**FAULTY, "output": str(tmp_path / "runs")}))
    result = prove(job, "--ranks", "2", "--json")
    assert result.returncode == 3, result.stderr
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
    assert proof == {**saved, "file": str(tmp_path / "runs" / "faulty-proof-0001.json")}


def test_a_wrong_job_leaves_no_files(tmp_path: Path) -> None:
    settings = [f"output={tmp_path / 'runs'}", "train.global_batch=1", "plan.axes.replicate=2"]
    result = prove(JOB, *(option for setting in settings for option in ("--set", setting)))
    assert result.returncode == 2
    assert "global_batch is 1" in result.stderr
    assert not (tmp_path / "runs").exists()

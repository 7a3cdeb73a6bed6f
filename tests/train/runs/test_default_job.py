"""The default job does what the README says of it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

MNIST = Path(__file__).parents[3] / "jobs" / "mnist.yaml"
KEYS = [
    "run",
    "steps",
    "loss",
    "metrics",
    "samples_per_s",
    "loader_share",
    "skipped_steps",
    "restarts",
    "predicted_step_s",
    "measured_step_s",
    "save_stall_s",
    "save_s",
    "recovery_s",
    "recovery_parts_s",
    "spare_memory_bytes",
    "peak_memory_bytes",
]


def train(folder: Path, *settings: str) -> dict[str, object]:
    command = [sys.executable, "-m", "meshwright", "train", str(MNIST), "--json", "--set", f"output={folder}"]
    for setting in settings:
        command += ["--set", setting]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_short_run_prints_the_json_of_the_design(tmp_path: Path) -> None:
    result = train(tmp_path, "train.steps=2", "data.eval.limit=64", "train.global_batch=16")
    assert list(result) == KEYS
    assert result["steps"] == 2
    assert Path(str(result["run"])).is_dir()


@pytest.mark.soak
def test_three_epochs_reach_97_percent(tmp_path: Path) -> None:
    result = train(tmp_path)
    metrics = result["metrics"]
    assert isinstance(metrics, dict)
    assert metrics["accuracy"] >= 0.97

"""The default job does what the README says of it."""

import json
from pathlib import Path

import pytest

from tests.forking.forked import start_command

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
    words = [word for setting in (f"output={folder}", *settings) for word in ("--set", setting)]
    process = start_command(["train", str(MNIST), "--json", *words])
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    result: dict[str, object] = json.loads(output.splitlines()[-1])
    return result


@pytest.mark.core
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

"""The default job in int8: less than a third of the size, and hardly less accurate."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.export.export import export
from meshwright.job import load_job
from tests.export.runs import train_run

MNIST = Path(__file__).parents[2] / "jobs" / "mnist.yaml"


def test_a_briefly_trained_model_is_smaller_and_equally_good(tmp_path: Path) -> None:
    settings = ["train.steps=8", "train.global_batch=32", "log.tensorboard=false", "data.eval.limit=64"]
    run = train_run(load_job(MNIST, settings), tmp_path / "mnist")
    whole, small = export(run, "safetensors", limit=0), export(run, "int8")
    assert small.bytes <= 0.3 * whole.bytes
    change = small.metrics["loss"]
    assert change.after == pytest.approx(change.before, rel=0.01)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_the_default_job_loses_at_most_three_tenths_of_a_point(tmp_path: Path) -> None:
    def run_command(*arguments: str) -> dict[str, object]:
        command = [sys.executable, "-m", "meshwright", *arguments, "--json"]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        result: dict[str, object] = json.loads(process.stdout.splitlines()[-1])
        return result

    run = str(run_command("train", str(MNIST), "--set", f"output={tmp_path}")["run"])
    whole = export(Path(run), "safetensors", limit=0)
    for options in ((), ("--dynamic",)):
        small = run_command("export", run, "--to", "int8", *options)
        assert float(str(small["bytes"])) <= 0.3 * whole.bytes
        metrics = small["metrics"]
        assert isinstance(metrics, dict)
        assert metrics["accuracy"]["change"] >= -0.003

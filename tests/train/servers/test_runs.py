"""Runs with parameter servers as users start them: with the command, and every worker and server a process."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.checkpoint.load import find_newest_valid
from meshwright.train.output.folder import RunFolder
from tests.train import commands
from tests.train.one_process import toy_job, train

JOB: dict[str, Any] = {
    "model": {"call": "torch.nn:Linear", "in_features": 20, "out_features": 5},
    "data": {"train": {"call": "tests.train.toy:points", "size": 50}, "partition": "sample"},
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    "checkpoint": {"every_steps": None},
    "log": {"every_steps": 1, "tensorboard": False},
}


def losses(folder: RunFolder) -> list[float]:
    entries = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    return [entry["loss"] for entry in entries if entry["kind"] == "train"]


@pytest.mark.soak
def test_a_run_keeps_its_parts_of_the_data_with_fewer_workers(tmp_path: Path) -> None:
    """Two workers have one part each. The worker that resumes alone has both, like one process with two parts."""
    steps = {"epochs": 2, "global_batch": 10, "seed": 3}
    run = RunFolder(tmp_path / "served" / "runs" / "toy-0001")
    for workers, until in ((2, 4), (1, 10)):
        plan = {"axes": {"replicate": workers}, "gradients": {"servers": 1}}
        changed = {**JOB, "plan": plan, "train": {**steps, "steps": until}}
        resume = str(run.path) if run.path.exists() else "never"
        process, _ = commands.start(tmp_path / "served", changed, workers, "--resume", resume)
        commands.finish(process, until)
    manifest = find_newest_valid(run.checkpoints).manifest
    assert manifest is not None
    assert manifest.about["parts"] == 2
    one = toy_job(**{**JOB, "data": {**JOB["data"], "parts": 2}, "train": steps})
    assert losses(run) == pytest.approx(losses(train(one, tmp_path / "alone").folder), rel=1e-5)
    other = toy_job(**{**JOB, "data": {**JOB["data"], "parts": 1}, "train": steps})
    assert losses(run) != pytest.approx(losses(train(other, tmp_path / "other").folder), rel=1e-2)

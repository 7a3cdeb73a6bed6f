"""Synchronous parameter servers are proved equal to one device, in processes as a user starts them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.train.runs.test_faults import JOB

ADAMW = {"call": "torch.optim:AdamW", "lr": 0.01, "weight_decay": 0.1, "groups": "no_decay"}
SCHEDULED = {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 2, "gamma": 0.5, "per": "step"}
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"servers": 2}, {"optimizer": ADAMW, "schedule": SCHEDULED, "train": {**JOB["train"], "clip_norm": 0.1}}),
    ({"servers": 1}, {"train": {**JOB["train"], "global_batch": 8}}),
]


@pytest.mark.soak
@pytest.mark.parametrize(("gradients", "changes"), CASES)
def test_synchronous_servers_are_proved(tmp_path: Path, gradients: dict[str, Any], changes: dict[str, Any]) -> None:
    plan = {"axes": {"replicate": 2}, "gradients": gradients, "memory": {"accumulation": 2}}
    file = tmp_path / "toy.yaml"
    file.write_text(yaml.safe_dump({**JOB, **changes, "plan": plan, "output": str(tmp_path / "runs")}))
    command = [sys.executable, "-m", "meshwright", "prove", str(file), "--steps", "4", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr + done.stdout
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["equal"]
    assert found["max_relative_error"] <= found["tolerance"] <= 1e-9
    assert found["checked"]["buffers"] == 15  # of BatchNorm, three of them before the first step, too


@pytest.mark.soak
def test_a_spoiled_gradient_is_found(tmp_path: Path) -> None:
    """A worker that pushes a thousandth too much is told from one that does not."""
    from meshwright.job import load_job
    from meshwright.proof.fault import Plant
    from meshwright.proof.prove import prove

    file = tmp_path / "toy.yaml"
    plan = {"axes": {"replicate": 2}, "gradients": {"servers": 1}}
    file.write_text(yaml.safe_dump({**JOB, "plan": plan, "output": str(tmp_path / "runs")}))
    job = load_job(file)
    assert job.plan != "auto"
    proof = prove(job, job.plan, plant=Plant(factor=1.001, rank=1))
    assert not proof.equal
    assert proof.first_difference is not None
    assert (proof.first_difference.step, proof.first_difference.what) == (1, "gradient")

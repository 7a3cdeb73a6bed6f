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
    result = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr + result.stdout
    proof = json.loads(result.stdout.splitlines()[-1])
    assert proof["equal"]
    assert proof["max_relative_error"] <= proof["tolerance"] <= 1e-9
    assert proof["checked"]["buffers"] == 15  # BatchNorm's three, before the first step and after each of four


@pytest.mark.soak
def test_a_wrong_gradient_of_a_worker_is_found(tmp_path: Path) -> None:
    """One worker pushes gradients that are a thousandth too large."""
    from meshwright.job import load_job
    from meshwright.proof.prove import prove
    from tests.proof.injected_fault import ScaledGradients

    file = tmp_path / "toy.yaml"
    plan = {"axes": {"replicate": 2}, "gradients": {"servers": 1}}
    file.write_text(yaml.safe_dump({**JOB, "plan": plan, "output": str(tmp_path / "runs")}))
    job = load_job(file)
    assert job.plan != "auto"
    proof = prove(job, job.plan, prepare_session=ScaledGradients(factor=1.001, rank=1))
    assert not proof.equal
    assert proof.first_difference is not None
    assert (proof.first_difference.step, proof.first_difference.what) == (1, "gradient")

"""Models of transformers train in a job without a loss, on two ranks whose batches have padding and ignored labels.
Models of timm train with a loss of torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.commands import RunCommand
from tests.proof.models.model_kinds import KINDS
from tests.proof.models.transformers_models import CASES

TIMM = [name for name in KINDS if name.startswith("timm")]


def job_of(name: str) -> dict[str, Any]:
    """Returns a job of 20 steps on the whole data set, which has 21 samples: the ranks get 11 and 10 of them."""
    job: dict[str, Any] = {
        "optimizer": {"call": "torch.optim:AdamW", "lr": 0.003},
        "train": {"steps": 20, "global_batch": 21, "clip_norm": 1.0},
        "log": {"every_steps": 1},
        "plan": {"axes": {"replicate": 2}},
        "cluster": "2xcpu",
    }
    if name in CASES:
        models = "tests.proof.models.transformers_models"
        data = {"call": f"{models}:Samples", "kind": CASES[name].samples}
    else:
        models = "tests.proof.models.model_kinds"
        data = {"call": f"{models}:Pictures"}
        job["loss"] = {"call": "torch.nn.functional:cross_entropy"}
    return {**job, "model": {"call": f"{models}:build", "name": name}, "data": {"train": data}}


@pytest.mark.soak
@pytest.mark.parametrize("name", [*CASES, *TIMM])
def test_a_model_trains_in_a_job(tmp_path: Path, run_command: RunCommand, name: str) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(yaml.safe_dump({**job_of(name), "output": str(tmp_path / "runs")}))
    result = run_command("train", str(job))
    assert result.exit_code == 0, result.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs" / "job-0001" / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert len(losses) == 20
    assert losses[-1] < 0.95 * losses[0]

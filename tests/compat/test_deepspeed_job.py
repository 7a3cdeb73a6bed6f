"""`meshwright train JOB --deepspeed FILE`: the configuration takes the place of the job's values."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from meshwright.compat.deepspeed_config.schedules import VALID_LR_SCHEDULES
from meshwright.compat.deepspeed_job import job_of_config
from meshwright.errors import InputError
from meshwright.job import Job, parse_job
from meshwright.user.call import load

RAW: dict[str, Any] = {
    "model": {"call": "torch.nn:Linear", "in_features": 2, "out_features": 2},
    "data": {"train": {"call": "meshwright.workloads.mnist:digits"}},
    "optimizer": {"call": "torch.optim:SGD", "lr": 0.5, "momentum": 0.9, "groups": "no_decay"},
    "train": {"steps": 40, "global_batch": 24, "clip_norm": 3.0},
}


def _changed(folder: Path, config: dict[str, Any], ranks: int = 2) -> tuple[Job, Any]:
    file = folder / "ds_config.json"
    file.write_text(json.dumps(config))
    return job_of_config(parse_job(RAW), file, ranks)


def test_the_configuration_replaces_what_it_says(tmp_path: Path) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.25,
        "fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 3},
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.8, 0.9]}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_max_lr": "auto"}},
        "dataloader_drop_last": True,
    }
    job, plan = _changed(tmp_path, config)
    assert (job.train.global_batch, job.train.clip_norm, job.data.drop_last) == (16, 0.25, True)
    assert (job.train.loss_scale.start, job.train.loss_scale.hysteresis) == (1024.0, 3)
    assert plan.summary() == "shard 2 · fp16 · fp16 weights · shard optimizer · accumulate 2"
    assert (job.optimizer.call, job.optimizer.groups) == ("torch.optim:AdamW", "no_decay")
    assert job.optimizer.arguments == {"lr": 0.5, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.0}
    assert job.schedule is not None
    assert job.schedule.call == "meshwright.compat.deepspeed_config.schedules:WarmupDecayLR"
    assert job.schedule.per == "step"
    assert job.schedule.arguments == {"total_num_steps": 40, "warmup_max_lr": 0.5}


def test_schedules_in_the_job_files_of_earlier_runs_are_found() -> None:
    for name in VALID_LR_SCHEDULES:
        assert load(f"meshwright.deepspeed_config.schedules:{name}").__name__ == name


def test_the_job_keeps_what_the_configuration_leaves_out(tmp_path: Path) -> None:
    job, plan = _changed(tmp_path, {"gradient_accumulation_steps": 3, "train_batch_size": "auto"})
    assert (job.train.global_batch, plan.memory.accumulation, plan.axes.replicate) == (24, 3, 2)
    assert (job.optimizer, job.schedule) == (parse_job(RAW).optimizer, None)
    assert job.train.clip_norm == 1.0  # DeepSpeed's default
    assert _changed(tmp_path, {"gradient_clipping": 0})[0].train.clip_norm is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"gradient_accumulation_steps": 5}, "24 cannot be a whole number × 5 × 2: write train_batch_size: 20"),
        ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op is sum, but plans average gradients"),
    ],
)
def test_what_does_not_fit_is_explained(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        _changed(tmp_path, config)


def test_shares_of_the_job_are_not_forgotten(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    job = parse_job({**RAW, "plan": {"axes": {"replicate": 2}, "shares": [2, 1]}})
    with pytest.raises(InputError, match=r"has shares, but --deepspeed .* leave out plan.shares, or --deepspeed"):
        job_of_config(job, tmp_path / "ds_config.json", 2)

"""A run says before its first step if its checkpoints could not hold its state."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import CheckpointError
from tests.train.one_process import make_trainer, toy_job, train


class RememberingSchedule(torch.optim.lr_scheduler.ExponentialLR):
    """A schedule whose state holds a function."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer, gamma=0.9)
        self.remembered: Any = train


def test_a_schedule_whose_state_cannot_be_saved_is_refused_before_the_first_step(tmp_path: Path) -> None:
    job = toy_job(schedule={"call": "tests.train.output.test_checkpoints:RememberingSchedule"})
    with pytest.raises(CheckpointError, match=r"schedule\['remembered'\] is a builtins.function, which cannot"):
        train(job, tmp_path)
    assert make_trainer(job, tmp_path).session.steps == 0
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize(
    "schedule",
    [
        {"call": "torch.optim.lr_scheduler:OneCycleLR", "max_lr": 0.1, "total_steps": 20},
        {"call": "torch.optim.lr_scheduler:MultiStepLR", "milestones": [1, 3]},
        {"call": "torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", "T_0": 3},
        {"call": "torch.optim.lr_scheduler:CyclicLR", "base_lr": 0.01, "max_lr": 0.1, "cycle_momentum": False},
        {"call": "torch.optim.lr_scheduler:PolynomialLR", "total_iters": 10},
    ],
    ids=lambda schedule: schedule["call"],
)
def test_the_schedules_of_torch_are_saved_and_resumed(tmp_path: Path, schedule: dict[str, Any]) -> None:
    job = toy_job(schedule=schedule, train={"epochs": None, "steps": 8})
    whole = train(job, tmp_path / "whole")
    train(job, tmp_path / "stopped", stop_after=4)
    resumed = train(job, tmp_path / "stopped")
    assert resumed.session.optimizer.param_groups[0]["lr"] == whole.session.optimizer.param_groups[0]["lr"]

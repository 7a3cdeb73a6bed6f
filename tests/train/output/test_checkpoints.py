"""The checkpoints of a run: what cannot be saved is said before the first step, infinite masks do not keep them from
being saved, and what goes wrong on rank 0 ends all ranks."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import CheckpointError, MeshwrightError, TrainingDiverged
from meshwright.processes.signals import StopRequest
from meshwright.train.output import checkpoints
from tests.ranks import RankPool
from tests.train.one_process import make_trainer, toy_job, train
from tests.train.toy import Net


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


# ---- infinite numbers in buffers


class BufferAfterFirstPass(Net):
    """The toy's model with a buffer of zeros, in which the first forward pass writes a number."""

    def __init__(self, hidden: int, name: str, number: float) -> None:
        super().__init__(hidden)
        self.name, self.number = name, number
        self.register_buffer(name, torch.zeros(3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        getattr(self, self.name).copy_(torch.full((3, 3), self.number).triu(1))
        return super().forward(x)


def train_with_buffer(folder: Path, name: str, number: float) -> list[str]:
    """Trains with such a buffer, and returns the names of the checkpoints."""
    call = {"call": "tests.train.output.test_checkpoints:BufferAfterFirstPass", "hidden": 8}
    job = toy_job(model={**call, "name": name, "number": number}, checkpoint={"every_steps": 4})
    train(job, folder)
    return sorted(path.name for path in (folder / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("number", [-float("inf"), float("inf")])
def test_a_mask_that_the_first_forward_pass_fills_is_saved(tmp_path: Path, number: float) -> None:
    assert train_with_buffer(tmp_path, "mask", number)[-1] == "step-00000010"


@pytest.mark.parametrize(
    ("name", "number"), [("mask", float("nan")), ("running_mean", float("inf")), ("running_var", float("inf"))]
)
def test_nan_and_infinite_running_statistics_are_not_saved(tmp_path: Path, name: str, number: float) -> None:
    with pytest.raises(TrainingDiverged, match="which is not saved"):
        train_with_buffer(tmp_path, name, number)
    assert list((tmp_path / "checkpoints").iterdir()) == []


# ---- errors on rank 0


def fail_on_rank_0(rank: int, size: int, folder: Path, part: str) -> str:
    """Trains until a part of a save fails on rank 0. Returns the class and the message of the error on this rank."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    if part == "no folder" and rank == 0:
        folder.mkdir(exist_ok=True)
        (folder / "checkpoints").write_text("a file is in the way")
    trainer = make_trainer(toy_job(checkpoint={"every_steps": 1}), folder, rank, size)
    with pytest.MonkeyPatch.context() as patch:
        if part in ("prune", "_replace_link"):
            patch.setattr(checkpoints, part, fail)
        if part == "_replace_link":
            patch.setattr(trainer, "best", checkpoints.BestCheckpoint(1, 0.5))
        if part == "deleted":
            patch.setattr(trainer, "_log", lambda _: (folder / "job.yaml").unlink(missing_ok=True))
        try:
            trainer.run(StopRequest())
        except MeshwrightError as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ("no folder", "File exists"),
        ("prune", "StorageError: FOLDER/checkpoints: the quota of user"),
        ("_replace_link", "StorageError: FOLDER/checkpoints: the quota of user"),
        ("deleted", "StorageError: FOLDER/job.yaml: FOLDER/job.yaml does not exist"),
    ],
)
def test_what_rank_0_cannot_write_ends_all_ranks(two: RankPool, tmp_path: Path, part: str, words: str) -> None:
    folder = tmp_path / "run"
    errors = two.run(fail_on_rank_0, folder, part)
    assert words.replace("FOLDER", str(folder)) in errors[0]
    assert errors[1] == errors[0]

"""Schedules of a job that need a metric: when they are stepped, saved and resumed, and which are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest
from meshwright.train.check import check_job
from meshwright.train.trainer import Trainer
from tests.proof.cases import prove_in_pool
from tests.ranks import RankPool
from tests.train.one_process import EVALUATED, session_of, toy_job, train
from tests.train.test_trainer import PRESET_VALUES

PLATEAU = "torch.optim.lr_scheduler:ReduceLROnPlateau"


class WithTwoMetrics:
    """A schedule whose step needs two values."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, first: float, second: float) -> None:
        raise AssertionError("never called")


def plateau_job(values: list[float], steps: int, **schedule: Any) -> Job:
    """A job that evaluates after every step, with these values of its metric `preset`, and halves the rate whenever it
    is not lower than before."""
    PRESET_VALUES[:] = values
    return toy_job(
        data=EVALUATED["data"],
        metrics={"preset": {"call": "tests.train.test_trainer:PresetMetric"}},
        log={"eval_every_steps": 1},
        train={"epochs": None, "steps": steps},
        optimizer={"call": "torch.optim:SGD", "lr": 1e-3},
        schedule={"call": PLATEAU, "metric": "preset", "factor": 0.5, "patience": 0, **schedule},
    )


def rate(trainer: Trainer) -> float:
    found: float = trainer.session.optimizer.param_groups[0]["lr"]
    return found


def test_a_plateau_is_stepped_with_the_metric_of_each_evaluation(tmp_path: Path) -> None:
    assert rate(train(plateau_job([3, 2, 2, 1, 4], 5), tmp_path)) == 1e-3 / 4


def test_its_state_is_resumed(tmp_path: Path) -> None:
    values: list[float] = [3, 2, 2, 1, 4]
    stopped = train(plateau_job(values, 5), tmp_path, stop_after=3)  # before the evaluation of step 3
    assert rate(stopped) == 1e-3
    assert rate(train(plateau_job(values[2:], 5), tmp_path)) == 1e-3 / 4  # the best value so far, 2, is known


def rate_on_rank(rank: int, size: int, folder: Path) -> tuple[float, float]:
    job = toy_job(
        **{**EVALUATED, "log": {"eval_every_steps": 1}, "train": {"epochs": None, "steps": 3}},
        optimizer={"call": "torch.optim:SGD", "lr": 1e-3},
        schedule={"call": PLATEAU, "patience": 0, "factor": 0.5, "threshold": 1e9, "threshold_mode": "abs"},
    )
    trainer = train(job, folder, rank=rank, size=size)
    schedule: Any = session_of(trainer).schedule
    assert trainer.last_evaluation is not None
    return rate(trainer), schedule.best


def test_the_loss_is_the_default_and_ranks_agree(tmp_path: Path, two: RankPool) -> None:
    first, second = two.run(rate_on_rank, tmp_path)
    assert first == second
    assert first[0] == 1e-3 / 4  # the loss never falls by as much as the threshold
    assert 0 < first[1] < 10


@pytest.mark.parametrize(
    ("schedule", "data", "message"),
    [
        ({"call": PLATEAU}, {}, "ReduceLROnPlateau is stepped with a metric of each evaluation, but data.eval is miss"),
        ({"call": PLATEAU, "per": "epoch"}, EVALUATED["data"], "schedule.per is epoch, but .* is stepped after each"),
        (
            {"call": "torch.optim.lr_scheduler:StepLR", "step_size": 3, "metric": "loss"},
            EVALUATED["data"],
            r"schedule.metric is 'loss', but .*StepLR.step\(\) needs no metric",
        ),
        ({"call": "tests.train.step.test_schedule:WithTwoMetrics"}, EVALUATED["data"], "needs more than one metric"),
    ],
)
def test_a_schedule_that_cannot_be_stepped_is_refused_before_ranks_start(
    schedule: dict[str, Any], data: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        check_job(toy_job(schedule=schedule, data=data), Plan(), find_cluster("1xcpu"))


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(InputError, match=r"schedule.metric is 'prest', but metrics has no metric .*'preset'"):
        plateau_job([1], 1, metric="prest")


def test_a_proof_says_that_the_schedule_is_not_stepped(tmp_path: Path, two: RankPool) -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2}, "numerics": {"batch_norm": "synchronized"}})
    proof = two.run(prove_in_pool, ProofRequest(plateau_job([], 1), plan, steps=6), tmp_path)[0]  # more than an epoch
    assert proof["equal"], proof["first_difference"]
    assert "the schedule needs a metric and is not stepped: nothing is evaluated in a proof" in proof["notes"]

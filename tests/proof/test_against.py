"""Two recorded runs held against each other: equal ones, broken ones, and some that cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.proof.against import against
from meshwright.proof.fault import Fault
from meshwright.train.build import build_data, build_loading
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder, record
from meshwright.train.output.recording import recording
from tests.proof.causes import faults
from tests.ranks import RankPool

R2 = {"axes": {"replicate": 2}}


def job(model: str = "Plain", **train: Any) -> Job:
    return Job.model_validate(
        {
            "model": {"call": f"tests.proof.cases:{model}"},
            "data": {"train": {"call": "tests.proof.cases:Points", "ignored": 6}, "workers": 0},
            "loss": {"call": "torch.nn.functional:cross_entropy"},
            "optimizer": {"call": "torch.optim:AdamW", "lr": 0.01},
            "train": {"epochs": 1, "global_batch": 8, "clip_norm": 0.05, **train},
        }
    )


def ran(rank: int, size: int, asked: Job, plan: Plan, folder: Path, fault: Fault, steps: int = 3) -> None:
    """A run with its first steps recorded, as the trainer does it."""
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    session = build_session(asked, plan, world, lambda doing: None)
    fault.before(session)
    if rank == 0:
        folder.mkdir(exist_ok=True)
        record(RunFolder(folder), asked, plan)
    train = asked.train
    batches = session.batches(
        build_data(asked)[0], train.epochs, train.global_batch, build_loading(asked, world.device)
    )
    with recording(session, RunFolder(folder).record, steps) as step:
        for number, batch in enumerate(batches, 1):
            given = fault.on_batch(batch, session, number)
            step(given)


def alone(folder: Path, asked: Job, plan: dict[str, Any] | None = None, steps: int = 3) -> Path:
    ran(0, 1, asked, Plan.model_validate(plan or {}), folder, Fault(), steps)
    return folder


def both(two: RankPool, folder: Path, asked: Job, fault: Fault, plan: dict[str, Any] = R2) -> tuple[Path, Path]:
    two.run(ran, asked, Plan.model_validate(plan), folder / "b", fault)
    return alone(folder / "a", asked), folder / "b"


def test_equal_runs_are_equal(two: RankPool, tmp_path: Path) -> None:
    proof = against(*both(two, tmp_path, job(), Fault()))
    assert proof.equal, proof.first_difference
    assert proof.checked == {"losses": 3, "gradients": 12, "norms": 3, "buffers": 0, "weights": 16}
    assert 0 < proof.max_relative_error < proof.tolerance < 1e-3
    assert "× 1.2e-07" in proof.derived


@pytest.mark.parametrize(
    ("fault", "cause", "said"),
    [
        (faults.OtherStart(), "different_start", "rank 1 started with another weight head.weight"),
        (faults.SamplesOfTheFirst(), "wrong_samples", "the second one lacked 4, and it had 4 others"),
        (faults.NotHeld(), "not_optimized", "no rank has it in its optimizer"),
        (faults.NotReplicated(), "missing_reduction", "not reduced over the replicate axis"),
        (faults.OwnMeans(), "uneven_targets", "the mean over data ranks of their own means"),
        (faults.Rounded("conv"), "low_precision", "what conv computed on rank 0 has 8 bits (bfloat16)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Fault) else "",
)
def test_a_broken_run_is_told_from_a_right_one(
    two: RankPool, tmp_path: Path, fault: Fault, cause: str, said: str
) -> None:
    first = against(*both(two, tmp_path, job(), fault)).first_difference
    assert first is not None
    assert first.cause == cause, first
    assert first.explanation is not None
    assert said in first.explanation


def test_batch_norm_over_fewer_samples_is_told(two: RankPool, tmp_path: Path) -> None:
    """Nothing is broken: this is what eight GPUs do and one does not."""
    first = against(*both(two, tmp_path, job("Residual"), Fault())).first_difference
    assert first is not None
    assert first.cause == "batch_norm", first
    assert "each data rank by itself; the first run (one rank · fp32): the whole global batch" in str(first.explanation)


def test_a_shorter_precision_has_a_wider_tolerance(tmp_path: Path) -> None:
    one, other = alone(tmp_path / "a", job()), alone(tmp_path / "b", job(), {"numerics": {"precision": "bf16"}})
    proof = against(one, other)
    assert proof.equal, proof.first_difference
    assert 1e-4 < proof.max_relative_error < proof.tolerance < 0.5
    assert proof.derived.endswith("× 0.0078")


def test_the_fewer_steps_of_both_are_compared(tmp_path: Path) -> None:
    proof = against(alone(tmp_path / "a", job()), alone(tmp_path / "b", job(), steps=2))
    assert proof.steps == 2
    assert proof.max_relative_error == 0
    assert any("3 and 2 steps were recorded" in note for note in proof.notes)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (job(seed=1), "train.seed is 0 there and 1 here"),
        (job("Residual"), "model is .*Plain.* there and .*Residual"),
        (job(global_batch=4), "train.global_batch is 8 there and 4 here"),
    ],
)
def test_other_trainings_are_refused(tmp_path: Path, asked: Job, told: str) -> None:
    one, other = alone(tmp_path / "a", job(), steps=1), alone(tmp_path / "b", asked, steps=1)
    with pytest.raises(InputError, match=told):
        against(one, other)


def test_runs_without_recorded_steps_are_refused(tmp_path: Path) -> None:
    one, other = alone(tmp_path / "a", job(), steps=1), alone(tmp_path / "b", job(), steps=0)
    with pytest.raises(InputError, match="no steps of this run were recorded, train it with --record 3"):
        against(one, other)
    with pytest.raises(InputError, match="this is no run folder"):
        against(one, tmp_path)


def test_the_command_exits_3_with_the_cause(two: RankPool, tmp_path: Path) -> None:
    one, other = both(two, tmp_path, job(), faults.SamplesOfTheFirst())
    ended = CliRunner().invoke(app, ["prove", "--against", str(one), str(other), "--json"])
    assert ended.exit_code == 3
    told = json.loads(ended.stdout.splitlines()[-1])
    assert told["against"] == str(one)
    assert told["first_difference"]["cause"] == "wrong_samples"
    assert Path(told["file"]).parent == other


def test_the_command_wants_a_job_or_two_runs() -> None:
    ended = CliRunner().invoke(app, ["prove"])
    assert isinstance(ended.exception, InputError)


def test_gradients_scaled_on_the_way_are_named(two: RankPool, tmp_path: Path) -> None:
    one, other = both(two, tmp_path, job(), Summed())
    first = against(one, other).first_difference
    assert first is not None
    assert first.cause == "scaled"
    assert "2 times those of one device: the size of the replicate axis" in str(first.explanation)


class Summed(Fault):
    """DDP adds up where it should average."""

    def before(self, session: Any) -> None:
        for parameter in session.module.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

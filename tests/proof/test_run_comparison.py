"""Two recorded runs are compared: equal ones, broken ones, and some that cannot be compared."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.proof.run_comparison import compare_runs
from meshwright.train.build import build_data, build_loading
from meshwright.train.job_session import build_session
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from meshwright.train.output.recording import record_steps
from tests.proof.causes import faults
from tests.proof.injected_fault import InjectedFault
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


def train_and_record(
    rank: int, size: int, training_job: Job, plan: Plan, folder: Path, fault: InjectedFault, steps: int = 3
) -> None:
    """Trains a job in every rank and records its first steps, as the trainer does it."""
    world = World(rank, rank, size, size, 0, torch.device("cpu"), None)
    session = build_session(training_job, plan, world, lambda activity: None)
    fault(session)
    if rank == 0:
        folder.mkdir(exist_ok=True)
        write_job_and_plan(RunFolder(folder), training_job, plan)
    train = training_job.train
    batches = session.batches(
        build_data(training_job)[0], train.epochs, train.global_batch, build_loading(training_job, world.device)
    )
    with record_steps(session, RunFolder(folder).record, steps) as step:
        for batch in batches:
            step(batch)


def run_alone(folder: Path, training_job: Job, plan: dict[str, Any] | None = None, steps: int = 3) -> Path:
    """The folder of a run in this process."""
    train_and_record(0, 1, training_job, Plan.model_validate(plan or {}), folder, InjectedFault(), steps)
    return folder


def run_twice(two: RankPool, folder: Path, training_job: Job, fault: InjectedFault) -> tuple[Path, Path]:
    """The folders of a run in this process and of one with a fault in two ranks."""
    two.run(train_and_record, training_job, Plan.model_validate(R2), folder / "b", fault)
    return run_alone(folder / "a", training_job), folder / "b"


def test_equal_runs_are_equal(two: RankPool, tmp_path: Path) -> None:
    proof = compare_runs(*run_twice(two, tmp_path, job(), InjectedFault()))
    assert proof.equal, proof.first_difference
    assert proof.checked == {"losses": 3, "gradients": 12, "norms": 3, "buffers": 0, "weights": 16}
    assert 0 < proof.max_relative_error < proof.tolerance < 1e-3
    assert "× 1.2e-07" in proof.tolerance_is


@pytest.mark.parametrize(
    ("fault", "cause", "words"),
    [
        (faults.DifferentInitialWeight(), "different_start", "rank 1 started with another weight head.weight"),
        (faults.SamplesOfRank0(), "wrong_samples", "the second one lacked 4, and it had 4 others"),
        (faults.MissingInOptimizer(), "not_optimized", "no rank has it in its optimizer"),
        (faults.NoReplicaReduction(), "missing_reduction", "not reduced over the replicate axis"),
        (faults.MeanOfRankMeans(), "uneven_targets", "the mean over data ranks of their own means"),
        (faults.RoundedLayer("conv"), "low_precision", "what conv computed on rank 0 has 8 bits (bfloat16)"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, InjectedFault) else "",
)
def test_a_broken_run_is_found_with_its_cause(
    two: RankPool, tmp_path: Path, fault: InjectedFault, cause: str, words: str
) -> None:
    first = compare_runs(*run_twice(two, tmp_path, job(), fault)).first_difference
    assert first is not None
    assert first.cause == cause, first
    assert first.explanation is not None
    assert words in first.explanation


def test_batch_norm_over_fewer_samples_is_named(two: RankPool, tmp_path: Path) -> None:
    """Nothing is broken: this is what eight GPUs do and one does not."""
    first = compare_runs(*run_twice(two, tmp_path, job("Residual"), InjectedFault())).first_difference
    assert first is not None
    assert first.cause == "batch_norm", first
    assert "each data rank by itself; the first run (one rank · fp32): the whole global batch" in str(first.explanation)


def test_a_shorter_precision_has_a_wider_tolerance(tmp_path: Path) -> None:
    reference = run_alone(tmp_path / "a", job())
    compared = run_alone(tmp_path / "b", job(), {"numerics": {"precision": "bf16"}})
    proof = compare_runs(reference, compared)
    assert proof.equal, proof.first_difference
    assert 1e-4 < proof.max_relative_error < proof.tolerance < 0.5
    assert proof.tolerance_is.endswith("× 0.0078")


def test_only_steps_that_both_runs_recorded_are_compared(tmp_path: Path) -> None:
    proof = compare_runs(run_alone(tmp_path / "a", job()), run_alone(tmp_path / "b", job(), steps=2))
    assert proof.steps == 2
    assert proof.max_relative_error == 0
    assert any("3 and 2 steps were recorded" in note for note in proof.notes)


@pytest.mark.parametrize(
    ("other_job", "message"),
    [
        (job(seed=1), "train.seed is 0 there and 1 here"),
        (job("Residual"), "model is .*Plain.* there and .*Residual"),
        (job(global_batch=4), "train.global_batch is 8 there and 4 here"),
    ],
)
def test_runs_of_different_jobs_are_refused(tmp_path: Path, other_job: Job, message: str) -> None:
    reference, compared = run_alone(tmp_path / "a", job(), steps=1), run_alone(tmp_path / "b", other_job, steps=1)
    with pytest.raises(InputError, match=message):
        compare_runs(reference, compared)


def test_runs_without_recorded_steps_are_refused(tmp_path: Path) -> None:
    reference, compared = run_alone(tmp_path / "a", job(), steps=1), run_alone(tmp_path / "b", job(), steps=0)
    with pytest.raises(InputError, match="no steps of this run were recorded, train it with --record 3"):
        compare_runs(reference, compared)
    with pytest.raises(InputError, match="this is no run folder"):
        compare_runs(reference, tmp_path)


def test_records_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    run = run_alone(tmp_path / "a", job(), steps=1)
    write_job_and_plan(RunFolder(run), job(), Plan.model_validate(R2))
    with pytest.raises(InputError, match=r"a: its record has the observations of 1 ranks, but its plan.yaml is for 2"):
        compare_runs(run, run)
    write_job_and_plan(RunFolder(run), job("Residual"), Plan())
    with pytest.raises(InputError, match=r"a: its record has .* of shape .*, but the job's model has"):
        compare_runs(run, run)
    (run / "record" / "step-0000.pt").write_bytes(b"damaged")
    with pytest.raises(InputError, match=r"record/step-0000.pt is damaged, it cannot be read as a recorded step"):
        compare_runs(run, run)


def test_the_command_exits_3_with_the_cause(two: RankPool, tmp_path: Path) -> None:
    reference, compared = run_twice(two, tmp_path, job(), faults.SamplesOfRank0())
    result = CliRunner().invoke(app, ["prove", "--against", str(reference), str(compared), "--json"])
    assert result.exit_code == 3
    proof = json.loads(result.stdout.splitlines()[-1])
    assert proof["against"] == str(reference)
    assert proof["first_difference"]["cause"] == "wrong_samples"
    assert Path(proof["file"]).parent == compared


def test_the_command_wants_a_job_or_two_runs() -> None:
    result = CliRunner().invoke(app, ["prove"])
    assert isinstance(result.exception, InputError)


def test_gradients_that_are_summed_instead_of_averaged_are_named(two: RankPool, tmp_path: Path) -> None:
    reference, compared = run_twice(two, tmp_path, job(), SummedGradients())
    first = compare_runs(reference, compared).first_difference
    assert first is not None
    assert first.cause == "scaled"
    assert "2 times those of one device: the size of the replicate axis" in str(first.explanation)


class SummedGradients(InjectedFault):
    """Gradients are twice as large, as if DDP had added them up instead of averaging."""

    def before(self, session: Any) -> None:
        for parameter in session.module.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)

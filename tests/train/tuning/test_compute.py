"""Tuning measures changes of `compute`, keeps those that make steps faster, and costs a run no more than it gains."""

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import Stopped
from meshwright.job import load_plan
from meshwright.parallel.check import check_runnable
from meshwright.plan import Plan
from meshwright.train import run
from meshwright.train.job_parts import JobParts
from meshwright.train.tuning import compute
from meshwright.train.tuning.compute import Tuning, tune
from meshwright.train.tuning.measure import MeasuredSteps, StepMeasurer
from tests.train.one_process import toy_job

GPU, CPU = find_cluster("1xH100"), find_cluster("2xcpu")
ONE_RANK = Plan()


class Measurer:
    """Stands in for the measuring process. `speedups` has the factor of each change, or the reason why it fails."""

    measured: list[str]

    def __init__(self, speedups: dict[str, float | str]) -> None:
        self._speedups = speedups
        self.measured = []

    def __call__(self, *_: Any) -> "Measurer":
        return self

    def __enter__(self) -> "Measurer":
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def measure(self, plan: Plan, timeout_s: float) -> MeasuredSteps | str:
        self.measured.append(plan.summary())
        step_s = 0.1
        for word, speedup in self._speedups.items():
            if word in plan.summary():
                if isinstance(speedup, str):
                    return speedup
                step_s /= speedup
        return MeasuredSteps(step_s, 1.0)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def tuned(
    monkeypatch: pytest.MonkeyPatch,
    measurer: Measurer,
    *,
    steps: int | None = 100_000,
    step_s: float | None = 0.1,
    cluster: Cluster = GPU,
    plan: Plan = ONE_RANK,
) -> tuple[Any, list[str]]:
    monkeypatch.setattr(compute, "StepMeasurer", measurer)
    lines: list[str] = []
    job = toy_job(train={"steps": steps, "epochs": None if steps else 5})
    if steps is None:
        monkeypatch.setattr(compute, "_steps_of", lambda parts: None)
    return tune(plan, JobParts(job), cluster, step_s, lines.append), lines


def test_changes_that_make_steps_faster_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = Measurer({"fused optimizer": 1.1, "CUDA graphs": 4.0, "compiled": 0.5})
    result, lines = tuned(monkeypatch, measurer)
    assert result.plan.summary() == "one rank · fp32 · CUDA graphs · fused optimizer"
    assert "22.7 ms of compute a step instead of 100 ms, paid back after " in result.reason
    assert lines == [
        f"tuning: measuring {name}"
        for name in ("the plan as it is", "a fused optimizer", "CUDA graphs", "a compiled model")
    ]


def test_the_next_run_of_the_job_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = tuned(monkeypatch, Measurer({"fused optimizer": 2.0}))
    measurer = Measurer({})
    again, _ = tuned(monkeypatch, measurer)
    assert again.plan == first.plan
    assert not measurer.measured
    other, _ = tuned(monkeypatch, measurer, plan=Plan.model_validate({"memory": {"accumulation": 2}}))
    assert measurer.measured, "another plan is another question"
    assert other.reason.endswith("found nothing faster")


def test_a_difference_like_that_between_two_measurements_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    result, _ = tuned(monkeypatch, Measurer({"fused optimizer": 1.02}))
    assert result.plan == ONE_RANK
    assert result.reason.endswith("found nothing faster")


@pytest.mark.parametrize(("steps", "step_s"), [(500, 0.1), (None, 0.1), (10_000, None)])
def test_a_run_that_cannot_earn_the_tuning_back_is_not_tuned(
    monkeypatch: pytest.MonkeyPatch, steps: int | None, step_s: float | None
) -> None:
    measurer = Measurer({"CUDA graphs": 4.0})
    assert tuned(monkeypatch, measurer, steps=steps, step_s=step_s) == (None, [])


def test_compiling_is_left_out_of_runs_that_are_not_much_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = Measurer({"fused optimizer": 2.0, "compiled": 4.0})
    result, lines = tuned(monkeypatch, measurer, steps=1_200)
    assert not any("compiled" in line for line in lines)
    assert result.plan.compute.fused_optimizer
    longer, _ = tuned(monkeypatch, measurer)
    assert longer.plan.compute.compile == "model", "a result without the change is not kept for longer runs"


def test_a_change_that_fails_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    result, lines = tuned(monkeypatch, Measurer({"CUDA graphs": "out of memory", "fused": 2.0}))
    assert "tuning: CUDA graphs is left out: out of memory" in lines
    assert not result.plan.compute.cuda_graphs


def test_cpu_ranks_try_no_cuda_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    measurer = Measurer({})
    tuned(monkeypatch, measurer, cluster=CPU, plan=Plan.model_validate({"axes": {"replicate": 2}}))
    assert not any("CUDA" in plan for plan in measurer.measured)


def test_cpu_ranks_try_nnpack_for_images() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3))
    changes = {name: change for name, change, _ in compute._changes(ONE_RANK, model, CPU)}
    assert changes["NNPACK's convolutions"] == {"layout": "contiguous", "convolutions": "nnpack"}
    for change in changes.values():
        plan = Plan.model_validate({"compute": {"convolutions": "nnpack"}})
        check_runnable(plan.model_copy(update={"compute": plan.compute.model_copy(update=change)}))
    assert "NNPACK's convolutions" not in [name for name, *_ in compute._changes(ONE_RANK, model, GPU)]
    assert "NNPACK's convolutions" not in [name for name, *_ in compute._changes(ONE_RANK, nn.Linear(1, 1), CPU)]


def test_steps_of_a_job_are_measured_in_a_process_of_their_own_and_its_end_is_noticed() -> None:
    """The data set has a worker: a process that ends with its parent may not start the workers of a loader."""
    bad = Plan.model_validate({"numerics": {"precision": "auto"}})
    with StepMeasurer(toy_job(data={"workers": 1}), ONE_RANK, CPU) as measurer:
        refused = measurer.measure(bad, 60)
        result = measurer.measure(ONE_RANK, 60)
        measurer._process.kill()
        assert measurer.measure(ONE_RANK, 60) == "the measuring process has ended"
    assert isinstance(refused, str)
    assert "precision is auto" in refused
    assert isinstance(result, MeasuredSteps)
    assert 0 < result.step_s < result.ready_s


# ---- runs


@pytest.mark.parametrize(
    ("allow", "tunes", "is_tuned"), [("rounding", True, True), ("rounding", False, False), ("same", True, False)]
)
def test_a_run_is_trained_with_the_tuned_plan_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    allow: str,
    tunes: bool,
    is_tuned: bool,
) -> None:
    fused = Plan.model_validate({"compute": {"fused_optimizer": True}})

    def no_ranks(*_: Any) -> None:
        raise Stopped("no rank was started")

    monkeypatch.setattr(run, "tune", lambda plan, *_: Tuning(fused, "tuned to a fused optimizer"))
    monkeypatch.setattr(run, "launch", no_ranks)
    job = toy_job(allow=allow, output=str(tmp_path))
    with pytest.raises(Stopped):
        run.train(job, ONE_RANK, find_cluster("1xcpu"), note="plan: one rank", tunes=tunes)
    (stored,) = tmp_path.glob("*/plan.yaml")
    assert load_plan(stored) == (fused if is_tuned else ONE_RANK)
    assert capsys.readouterr().err.splitlines() == ["plan: one rank", *["tuned to a fused optimizer"] * is_tuned]


def test_a_run_that_is_stopped_while_it_is_tuned_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: Any) -> Tuning:
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "tune", stopped)
    job = toy_job(allow="rounding", output=str(tmp_path / "runs"))
    with pytest.raises(KeyboardInterrupt):
        run.train(job, ONE_RANK, find_cluster("1xcpu"), tunes=True)
    assert not (tmp_path / "runs").exists()

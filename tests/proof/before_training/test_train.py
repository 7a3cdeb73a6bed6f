"""Tests `meshwright train`: an unequal plan is refused before anything is written, `auto` takes another one, and
`--unproved` trains it nevertheless."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.auto import decide
from meshwright.auto.decision import Decision
from meshwright.cli.training import train_here
from meshwright.errors import InputError, UnequalPlan
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.proof.before_training import check
from meshwright.proof.before_training import job as job_check
from meshwright.proof.before_training.before_training import check_here
from tests.proof.injected_fault import ScaledGradients

TENSOR = Plan.model_validate({"axes": {"tensor": 2}})
MODEL = "tests.proof.before_training.models"


def job_in(folder: Path, plan: Any = "auto") -> Job:
    fields = {
        "model": {"call": f"{MODEL}:Blocks"},
        "data": {"train": {"call": f"{MODEL}:samples"}, "workers": 0},
        "loss": {"call": "torch.nn.functional:cross_entropy"},
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
        "train": {"steps": 2, "global_batch": 4},
        "plan": plan,
        "cluster": "2xcpu",
        "output": str(folder / "runs"),
    }
    file = folder / "job.yaml"
    file.write_text(yaml.safe_dump(fields))
    return load_job(file)


def plant_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the ranks of checks scale their gradients. Forked ranks get the fault with the request of the proof."""
    monkeypatch.setattr(job_check, "check_here", partial(check_here, prepare_session=ScaledGradients()))


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_an_unequal_plan_is_refused_before_anything_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant_fault(monkeypatch)
    job = job_in(tmp_path)
    with pytest.raises(UnequalPlan, match=r"tensor 2.*does not train the same model.*scaled.*--unproved") as caught:
        train_here(job, TENSOR, None, "auto", 0)
    assert caught.value.exit_code == 3
    assert "the fastest plan that trains the same model is replicate 2" in str(caught.value)
    assert not (tmp_path / "runs").exists()
    assert train_here(job, TENSOR, None, "auto", 0, unproved=True)["steps"] == 2


def test_a_job_is_checked_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = job_in(tmp_path)
    assert train_here(job, TENSOR, None, "never", 0)["steps"] == 2
    assert "checked that tensor 2 · fp32 trains the same model as one device: equal to" in capfd.readouterr().err
    monkeypatch.setattr(check, "prove_in_new_ranks", None)  # a second check would call it
    assert train_here(job, TENSOR, None, "never", 0)["steps"] == 2
    assert "checked that" not in capfd.readouterr().err


def test_auto_ends_if_there_is_no_other_plan(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plant_fault(monkeypatch)
    monkeypatch.setattr(decide, "plan_of_job", lambda *_, **__: Decision(TENSOR))
    monkeypatch.setattr("meshwright.proof.before_training.job.plan_of_job", lambda *_, **__: Decision(TENSOR))
    with pytest.raises(UnequalPlan):
        train_here(job_in(tmp_path), "auto", None, "auto", 0)
    assert not list((tmp_path / "runs").glob("*"))


def test_auto_takes_the_next_best_plan(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plant_fault(monkeypatch)
    job, fastest_first = job_in(tmp_path), [{"tensor": 2}, {"tensor": 2}, {"replicate": 2}]

    def plan_of_job(parts: Any, cluster: Any, plan: Any, resume: str = "never", refuse: Any = None) -> Decision:
        for axes in fastest_first:
            candidate = Plan.model_validate({"axes": axes})
            try:
                if refuse is not None:
                    refuse(candidate)
                return Decision(candidate)
            except InputError:
                continue
        raise AssertionError

    monkeypatch.setattr(decide, "plan_of_job", plan_of_job)
    monkeypatch.setattr("meshwright.proof.before_training.job.plan_of_job", plan_of_job)
    result = train_here(job, "auto", None, "auto", 0)
    lines = capfd.readouterr().err
    assert result["steps"] == 2
    assert lines.count("auto takes the next best plan") == 1
    plan = yaml.safe_load((Path(result["run"]) / "plan.yaml").read_text())
    assert plan["axes"]["replicate"] == 2

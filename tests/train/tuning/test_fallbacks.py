"""A run whose compiler or capture fails writes down the plan that it goes on with."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from meshwright.auto.decision import reasons_of
from meshwright.job import load_plan
from meshwright.plan import Plan
from meshwright.train.output.folder import RunFolder, write_job_and_plan
from meshwright.train.session import Session
from meshwright.train.tuning.fallbacks import FallbackRecord
from tests.parallel.compiler import compiling_with
from tests.train.one_process import toy_job, train

COMPILED = Plan.model_validate({"compute": {"compile": "model"}})


def failing(graph: Any, inputs: Any) -> Any:
    raise RuntimeError("no code for this")


@pytest.mark.parametrize("backend", [failing, "eager"])
def test_a_run_goes_on_with_the_plan_that_it_can_run(tmp_path: Path, backend: Any) -> None:
    folder, job = (
        RunFolder(tmp_path),
        toy_job(plan={"compute": {"compile": "model"}}, log={"every_steps": 1, "tensorboard": False}),
    )
    write_job_and_plan(folder, job, COMPILED, None, reasons_of(COMPILED, "found"))
    with compiling_with(backend):
        train(job, tmp_path)
    reasons = yaml.safe_load(folder.reasons.read_text())
    if backend == "eager":
        assert load_plan(folder.plan) == COMPILED
        assert reasons["compute.compile"] == "found"
    else:
        assert load_plan(folder.plan) == Plan()
        assert reasons["compute.compile"] == "the compiler failed in this run, as its log says"
    assert reasons["compute.layout"] == "the default"


def test_a_step_that_cannot_be_captured_is_written_down_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan.model_validate({"compute": {"cuda_graphs": True}})
    session = Session.__new__(Session)
    monkeypatch.setattr(Session, "plan", plan, raising=False)
    monkeypatch.setattr(Session, "graphs", SimpleNamespace(failure="it reads a value"), raising=False)
    folder = RunFolder(tmp_path)
    write_job_and_plan(folder, toy_job(), plan)
    record = FallbackRecord(folder, toy_job(), session)
    record.update()
    assert load_plan(folder.plan) == Plan()
    assert yaml.safe_load(folder.reasons.read_text()) == {
        "compute.cuda_graphs": "the step could not be captured: it reads a value"
    }
    folder.plan.unlink()
    record.update()
    assert not folder.plan.exists()

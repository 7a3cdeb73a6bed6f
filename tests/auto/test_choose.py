"""`plan: auto` of a job is a plan that runs and does not change the numerics, and finding it builds every part once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.auto.choose import plan_of_job, unmeasured_note
from meshwright.errors import InputError, UserCodeError
from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.profile.structure import model_structure
from meshwright.profile.tracing import real_steps
from meshwright.train import job_parts
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from tests.auto.machines import cpu_cluster

TWO_REPLICAS = Plan.model_validate({"axes": {"replicate": 2}})


def toy_job(**train: Any) -> Job:
    return parse_job(
        {
            "model": {"call": "tests.train.toy:Net"},
            "data": {"train": {"call": "tests.train.toy:points"}},
            "loss": {"call": "torch.nn.functional:cross_entropy"},
            "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
            "train": {"epochs": 1, "global_batch": 30, **train},
        }
    )


@pytest.mark.parametrize("batch", [30, 33])
def test_a_job_gets_a_plan_that_runs_and_does_not_change_the_numerics(batch: int) -> None:
    job, measured = toy_job(global_batch=batch), cpu_cluster(2)
    (node,) = measured.nodes
    unknown = node.device.model_copy(update={"bandwidth_bytes_per_s": None, "rates": {}})
    unmeasured = measured.model_copy(update={"nodes": (node.model_copy(update={"device": unknown}),)})
    assert plan_of_job(JobParts(job), unmeasured, "auto") == (TWO_REPLICAS, None)
    plan, step_s = plan_of_job(JobParts(job), measured, "auto")
    assert plan == TWO_REPLICAS
    assert step_s is not None
    assert plan_of_job(JobParts(job), measured, TWO_REPLICAS) == (TWO_REPLICAS, pytest.approx(step_s))
    assert plan_of_job(JobParts(job), measured, Plan())[1] is not None
    assert "is not measured" in (unmeasured_note(plan, unmeasured, "auto") or "")
    assert unmeasured_note(plan, measured, "auto") is None
    assert unmeasured_note(plan, unmeasured, plan) is None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the expensive functions are called."""
    counter: Counter[str] = Counter()

    def count(module: Any, name: str) -> None:
        function: Callable[..., Any] = getattr(module, name)

        def counted(*args: Any, **keywords: Any) -> Any:
            counter[name] += 1
            return function(*args, **keywords)

        monkeypatch.setattr(module, name, counted)

    count(job_parts, "build_data")
    count(job_parts, "sample_batch")
    count(job_parts, "construct_model")
    count(model_structure, "find_structure")
    count(real_steps, "trace_profile")
    return counter


def test_planning_and_checking_a_job_build_its_parts_once(calls: Counter[str]) -> None:
    job, cluster = toy_job(), cpu_cluster(2)
    parts = JobParts(job)
    plan, _ = plan_of_job(parts, cluster, "auto")
    check_job(job, plan, cluster, parts)
    tensor = Plan.model_validate({"axes": {"tensor": 2}})
    check_job(job, tensor, cluster, parts)
    traced = calls.pop("trace_profile")
    assert calls == {"build_data": 1, "sample_batch": 1, "construct_model": 1, "find_structure": 1}
    plan_of_job(parts, cluster, tensor)
    assert calls["find_structure"] == 1
    assert calls["trace_profile"] == 0, "the profile is the one that the search traced"
    assert traced >= 1


def test_released_parts_are_built_again(calls: Counter[str]) -> None:
    parts = JobParts(toy_job())
    first = parts.data
    assert parts.data is first
    parts.release()
    assert parts.data is not first
    assert calls["build_data"] == 2


def test_a_mistake_in_the_data_is_reported_by_every_reader() -> None:
    job = parse_job({**toy_job().model_dump(mode="json"), "data": {"train": {"call": "fractions:Fraction"}}})
    parts = JobParts(job)
    assert plan_of_job(parts, cpu_cluster(2), "auto") == (TWO_REPLICAS, None)
    with pytest.raises(InputError, match="which is no data set"):
        check_job(job, TWO_REPLICAS, cpu_cluster(2), parts)


def test_a_model_file_that_exits_is_executed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_model.py").write_text("print('executed')\nexit()\n")
    raw = {**toy_job().model_dump(mode="json"), "model": {"call": "my_model.py:Net"}}
    with pytest.raises(UserCodeError, match=r"importing it failed: SystemExit: exit code 0 \(.*my_model.py, line 2\)"):
        plan_of_job(JobParts(parse_job(raw, folder=tmp_path)), cpu_cluster(2), "auto")
    assert capsys.readouterr().out == "executed\n"

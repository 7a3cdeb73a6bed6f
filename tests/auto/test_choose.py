"""`plan: auto` of a job is a plan that runs and does not change the numerics, and finding it builds every part once."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshwright.auto import decide
from meshwright.auto.decide import plan_of_job
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError, UserCodeError
from meshwright.job import Job, parse_job
from meshwright.plan import Plan
from meshwright.profile.structure import model_structure
from meshwright.profile.tracing import real_steps
from meshwright.train import job_parts
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.output.folder import lock_run_folder, write_job_and_plan
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
    without = plan_of_job(JobParts(job), unmeasured, "auto")
    assert (without.plan, without.step_s) == (TWO_REPLICAS, None)
    assert "is not measured" in (without.line or "")
    best = plan_of_job(JobParts(job), measured, "auto")
    assert best.plan == TWO_REPLICAS
    assert best.step_s is not None
    assert (best.line or "").startswith("plan: replicate 2 · fp32, ")
    assert (best.line or "").endswith(" a step predicted")
    compiled = [variant.plan.compute.compile for variant in best.variants()]
    assert compiled == ["none", "none", "model"], "steps of these are timed before the run"
    named = plan_of_job(JobParts(job), measured, TWO_REPLICAS)
    assert named.variants() == []
    assert (named.plan, named.step_s, named.line) == (TWO_REPLICAS, pytest.approx(best.step_s), None)
    assert plan_of_job(JobParts(job), measured, Plan()).step_s is not None
    assert plan_of_job(JobParts(job), unmeasured, TWO_REPLICAS).prediction is None


def raising(error: Exception) -> Callable[..., Any]:
    """A function of the user's, as this file is none of Meshwright's."""

    def fails(*_: Any, **__: Any) -> Any:
        raise error

    return fails


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("planning_inputs", raising(InputError("no plan fits")), "no plan fits"),
        ("measured_search", raising(InputError("no plan fits")), "no plan fits"),
        ("measured_search", raising(KeyError("x")), f"KeyError: 'x' ({__file__}, line "),
        (
            "planning_inputs",
            lambda *_, **__: (None, None),
            "a fault of Meshwright, which we ask you to report: AttributeError: 'NoneType' object has no attribute",
        ),
    ],
)
def test_without_a_prediction_the_line_says_why(
    name: str, function: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decide, name, function)
    chosen = plan_of_job(JobParts(toy_job()), cpu_cluster(2), "auto")
    assert (chosen.line or "").startswith(f"plan: {TWO_REPLICAS.summary()}, without a prediction: {words}")
    assert chosen.plan == TWO_REPLICAS
    assert plan_of_job(JobParts(toy_job()), cpu_cluster(2), TWO_REPLICAS).line is None


def test_the_line_warns_of_programs_that_disturbed_the_measurement() -> None:
    parts, measured = JobParts(toy_job()), cpu_cluster(2)
    line = plan_of_job(parts, measured, "auto").line or ""
    busy = plan_of_job(parts, measured.model_copy(update={"busy_cores": 1.5}), "auto").line or ""
    assert busy.startswith(f"{line}\nwarning: Other programs used 1.5 of {measured.cores} cores while this machine was")


@pytest.mark.parametrize(("allow", "precision"), [({}, "fp32"), ({"allow": "changes"}, "bf16")])
def test_what_a_plan_may_change_is_said_by_the_job(allow: dict[str, Any], precision: str) -> None:
    job = parse_job({**toy_job().model_dump(mode="json", exclude={"allow"}), **allow})
    plan = plan_of_job(JobParts(job), find_cluster("2xH100"), "auto").plan
    assert plan.numerics.precision == precision
    assert plan.stays_within(job.allow)


def store_run(job: Job, plan: Plan, folder: Path, cluster: Cluster | None = None) -> Job:
    """Returns the job with an unfinished run in `folder`, which was trained with this plan."""
    job = job.model_copy(update={"output": str(folder)})
    locked_run = lock_run_folder(job, "never")
    write_job_and_plan(locked_run.folder, job, plan, cluster)
    locked_run.folder.logs.mkdir()
    locked_run.lock.close()
    return job


SHARDS = Plan.model_validate({"axes": {"shard": 2}, "compute": {"fused_optimizer": True}})


def test_a_resumed_run_keeps_its_plan_and_searches_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("measured_search", "search_with_offload"):
        monkeypatch.setattr(decide, name, lambda *_: pytest.fail("a plan is searched"))
    job = store_run(toy_job(), SHARDS, tmp_path)
    for resume in ("auto", str(tmp_path / "job-0001")):
        resumed = plan_of_job(JobParts(job), cpu_cluster(2), "auto", resume)
        assert resumed.plan == SHARDS
        assert resumed.variants() == [], "a tuned plan is kept"
        assert resumed.step_s is not None
        assert resumed.line == f"plan: {SHARDS.summary()}, with which {tmp_path}/job-0001 was trained before"
    assert plan_of_job(JobParts(job), cpu_cluster(2), TWO_REPLICAS, "auto").plan == TWO_REPLICAS


@pytest.mark.parametrize(
    ("stored", "devices", "changes"),
    [
        (SHARDS, 1, {}),  # the machine has fewer devices than before
        (SHARDS, 3, {}),  # or more
        (SHARDS, 2, {"allow": "same"}),  # the user has changed the job
    ],
)
def test_a_resumed_run_is_planned_anew_if_its_plan_does_not_suit(
    stored: Plan, devices: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    job = store_run(toy_job(), stored, tmp_path).model_copy(update=changes)
    plan = plan_of_job(JobParts(job), cpu_cluster(devices), "auto", "auto").plan
    assert plan.world_size == devices
    assert not plan.compute.fused_optimizer


def test_a_plan_for_another_kind_of_device_is_not_kept(tmp_path: Path) -> None:
    graphs = Plan.model_validate({"compute": {"cuda_graphs": True, "fused_optimizer": True}})
    on_gpu, here = find_cluster("1xH100"), cpu_cluster(1)
    job = store_run(toy_job(), graphs, tmp_path, on_gpu)
    assert plan_of_job(JobParts(job), on_gpu, "auto", "auto").plan == graphs
    assert plan_of_job(JobParts(job), here, "auto", "auto").plan == Plan()


def test_a_plan_that_cannot_be_read_is_not_kept(tmp_path: Path) -> None:
    job = store_run(toy_job(), SHARDS, tmp_path)
    (tmp_path / "job-0001" / "plan.yaml").write_text("axes: {replicas: 2}")
    assert plan_of_job(JobParts(job), cpu_cluster(2), "auto", "auto").plan == TWO_REPLICAS


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
    plan = plan_of_job(parts, cluster, "auto").plan
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
    chosen = plan_of_job(parts, cpu_cluster(2), "auto")
    assert (chosen.plan, chosen.step_s) == (TWO_REPLICAS, None)
    assert "without a prediction: data.train makes a Fraction, which is no data set" in (chosen.line or "")
    with pytest.raises(InputError, match="which is no data set"):
        check_job(job, TWO_REPLICAS, cpu_cluster(2), parts)


def test_a_model_file_that_exits_is_executed_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my_model.py").write_text("print('executed')\nexit()\n")
    raw = {**toy_job().model_dump(mode="json"), "model": {"call": "my_model.py:Net"}}
    with pytest.raises(UserCodeError, match=r"importing it failed: SystemExit: exit code 0 \(.*my_model.py, line 2\)"):
        plan_of_job(JobParts(parse_job(raw, folder=tmp_path)), cpu_cluster(2), "auto")
    assert capsys.readouterr().out == "executed\n"

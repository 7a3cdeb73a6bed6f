"""A run with `plan: auto` begins with timing the variants of its plan, unless the job or its length says otherwise."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshwright.auto import decide
from meshwright.auto.decision import Decision, reasons_of
from meshwright.cli.training import train_here
from meshwright.cluster.detect import find_cluster
from meshwright.errors import Stopped
from meshwright.job import Job, load_plan
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS
from meshwright.train import run
from meshwright.train.job_parts import JobParts
from meshwright.train.tuning.job import tune_job
from meshwright.train.tuning.processes import StepMeasurer
from meshwright.train.tuning.variants import Timing, Variant
from tests.train.one_process import toy_job

CPU = find_cluster("1xcpu")
EAGER = Plan()
FUSED = Plan.model_validate({"compute": {"fused_optimizer": True}})
COMPILED = Plan.model_validate({"compute": {"compile": "model"}})
VARIANTS = [Variant(EAGER), Variant(FUSED), Variant(COMPILED)]


class Measured:
    """Stands in for the measuring processes: the fused optimizer is twice as fast."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plans: list[Plan] = []
        self.limits: list[float] = []

        def measure(_: StepMeasurer, plan: Plan, limit_s: float, finds_spread: bool) -> list[Timing]:
            self.plans.append(plan)
            self.limits.append(limit_s)
            return [Timing(1.0, 0.05 if plan.compute.fused_optimizer else 0.1, (1.0,))]

        monkeypatch.setattr(StepMeasurer, "measure", measure)


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tuned(job: Job, *, step_s: float | None = 0.1, plan: Plan = EAGER) -> tuple[Plan, list[str]]:
    lines: list[str] = []
    taken, line = tune_job(plan, lambda: VARIANTS, JobParts(job), CPU, step_s, lines.append)
    assert line == (lines[-1] if lines else "")
    return taken, lines


def long_job(**sections: Any) -> Job:
    return toy_job(**{"train": {"steps": 100_000, "epochs": None, **sections.pop("train", {})}, **sections})


def test_the_fastest_variant_is_taken_and_the_next_run_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    plan, lines = tuned(long_job())
    assert plan == FUSED
    assert lines == ["measured 3 variants in 3 s: eager and fused optimizer 50 ms, eager 100 ms, compiled 100 ms"]
    assert measured.limits[0] == 60
    assert len(measured.plans) == 3
    again, lines_again = tuned(long_job())
    assert again == FUSED
    assert lines_again == [f"{lines[0]} (in an earlier run)"]
    assert len(measured.plans) == 3
    tuned(long_job(train={"global_batch": 20}))
    assert len(measured.plans) == 6, "another batch is another question"


@pytest.mark.parametrize(
    ("sections", "limit_s"),
    [
        ({"tune": 30}, 30),
        ({"tune": 500, "train": {"steps": 10}}, 500),
        ({"train": {"steps": 2_000}}, 10),
        ({"train": {"steps": 500}}, None),  # 2.5 s: the measuring process would take longer to start
        ({"tune": 0}, None),
        ({"tune": False}, None),
        ({"train": {"deterministic": True}}, None),
    ],
)
def test_the_budget_is_that_of_the_job_or_a_share_of_the_run(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], limit_s: float | None
) -> None:
    measured = Measured(monkeypatch)
    plan, lines = tuned(long_job(**sections))
    assert measured.limits[:1] == ([] if limit_s is None else [limit_s])
    assert (plan == FUSED) == (limit_s is not None)
    assert bool(lines) == (limit_s is not None)


def test_a_run_of_unknown_length_is_tuned_for_60_s(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    tuned(toy_job(), step_s=None)
    assert measured.limits[0] == 60


def test_plans_that_divide_the_model_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    for axis in ("shard", "tensor", "pipeline", "context"):
        plan = Plan.model_validate({"axes": {axis: 2}})
        assert tuned(long_job(), plan=plan) == (plan, [])
    assert not measured.plans


def test_in_a_short_run_the_whole_model_is_compiled_if_the_search_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = Measured(monkeypatch)
    graphs = Plan.model_validate({"compute": {"compile": "model", "cuda_graphs": True}})
    line = "the budget is too small to time variants: compiled, as predictions prefer"
    for _ in range(2):
        assert tuned(long_job(train={"steps": 10}), plan=graphs) == (COMPILED, [line])
    assert not measured.plans


# ---- runs


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that finds the eager plan."""

    def plan_of_job(*_: Any, **__: Any) -> Decision:
        reasons = reasons_of(EAGER, "found", "found")
        return Decision(EAGER, reasons, line="plan: one rank", variants=lambda: list(VARIANTS))

    monkeypatch.setattr(decide, "plan_of_job", plan_of_job)


@pytest.mark.usefixtures("searched")
@pytest.mark.parametrize("tune", [True, 0])
def test_a_run_is_trained_with_the_tuned_plan_which_is_stored_with_its_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], tune: float
) -> None:
    def no_ranks(*_: Any) -> None:
        raise Stopped("no rank was started")

    Measured(monkeypatch)
    monkeypatch.setattr(run, "launch", no_ranks)
    with pytest.raises(Stopped):
        train_here(long_job(tune=tune, output=str(tmp_path / "runs")), "auto", "1xcpu", "never", 0)
    (stored,) = tmp_path.glob("runs/*/plan.yaml")
    assert load_plan(stored) == (FUSED if tune else EAGER)
    lines = capsys.readouterr().err.splitlines()
    lines = lines[lines.index("plan: one rank") + 1 :]
    assert [line.split(" in ")[0] for line in lines] == (["measured 3 variants"] if tune else [])
    reasons = yaml.safe_load(stored.with_name("reasons.yaml").read_text())
    assert list(reasons) == list(FIELDS)
    assert reasons["axes.replicate"] == "found"
    assert reasons["compute.fused_optimizer"] == (f"measured: {lines[0]}" if tune else "found")
    assert reasons["modules.sequence"].startswith("has no effect in this plan, which has no tensor axis")


@pytest.mark.usefixtures("searched")
def test_a_run_that_is_stopped_while_it_is_tuned_leaves_no_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stopped(*_: Any) -> Sequence[Timing]:
        raise KeyboardInterrupt

    monkeypatch.setattr(StepMeasurer, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        train_here(long_job(output=str(tmp_path / "runs")), "auto", "1xcpu", "never", 0)
    assert not (tmp_path / "runs").exists()

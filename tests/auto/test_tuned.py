"""`best_plan` for the ranks that there are times variants of its plan on copies of the model, and keeps the choice."""

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.auto import choose, tuned
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.names import cluster_from_name
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.tuning import in_process
from meshwright.train.tuning.variants import Timing
from tests.auto.machines import cpu_cluster
from tests.ranks import RankPool
from tests.train.one_process import world
from tests.train.tuning.timed import BATCH, everything, is_same, trained


def machine(name: str, _: Any) -> Cluster:
    """Known devices instead of this machine, which would have to be measured."""
    return cpu_cluster(int(name.removesuffix("xcpu")))


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(choose, "find_cluster", machine)


def best_plan(global_batch: int = 8, **options: Any) -> Plan:
    model, optimizer = trained()
    settings = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "device": "cpu", **options}
    return mw.best_plan(model, BATCH, global_batch=global_batch, **settings)


class Timings:
    """Takes the place of timing on this rank: the seconds by the number of the variant, which then ends."""

    def __init__(self, *step_s: float) -> None:
        self.step_s = step_s
        self.plans: list[Plan] = []
        self.limits: list[float] = []

    def __call__(self, plan: Plan, _: Any, __: Any, world: World, limit_s: float, ___: bool) -> Timing:
        self.plans.append(plan)
        self.limits.append(limit_s)
        number = len(self.plans) - 1
        return Timing(1.0, self.step_s[number] if number < len(self.step_s) else 1.0, (1.0,))


@pytest.fixture
def timings(monkeypatch: pytest.MonkeyPatch) -> Timings:
    """The second of the variants, which is the one with a fused optimizer, is the fastest."""
    result = Timings(0.02, 0.01)
    monkeypatch.setattr(in_process, "_time_here", result)
    return result


def test_the_fastest_variant_is_taken_and_the_next_call_measures_nothing(
    timings: Timings, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = best_plan()
    assert plan == timings.plans[1]
    assert plan.compute.fused_optimizer
    computes = [plan.compute.compile for plan in timings.plans]
    assert computes == ["none", "none", "model"], "eager steps and the compiled model are always among them"
    assert timings.limits[0] == 60
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "measured 3 variants in 3 s: eager and fused optimizer 10 ms, eager 20 ms, compiled 1e+03 ms"
    )
    assert best_plan() == plan
    assert len(timings.plans) == 3
    assert capsys.readouterr().err.splitlines() == [f"{line} (in an earlier run)"]
    best_plan(global_batch=16)
    assert len(timings.plans) == 6, "another batch is another question"


def test_a_damaged_file_of_a_choice_is_measured_again(timings: Timings, tmp_path: Path) -> None:
    best_plan()
    (file,) = tmp_path.glob("meshwright/tuning/*.json")
    file.write_text("{")
    best_plan()
    assert len(timings.plans) == 6


@pytest.mark.parametrize(
    "options",
    [
        {"tune": 0},
        {"cluster": "1xH100"},
        {"allow": "same"},
        {"fix": {"compute": {"compile": "none", "fused_optimizer": False}}},
    ],
    ids=["tune=0", "another cluster", "nothing may change", "fixed"],
)
def test_what_is_not_measured(timings: Timings, options: dict[str, Any]) -> None:
    if "cluster" in options:
        options = {**options, "cluster": cluster_from_name("1xH100")}
    plan = best_plan(**options)
    fixed = "fix" in options
    assert [plan.compute.compile for plan in timings.plans] == (["none"] if fixed else [])
    assert not plan.compute.fused_optimizer or "cluster" in options


def test_deterministic_algorithms_are_not_measured(timings: Timings) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        best_plan()
    finally:
        torch.use_deterministic_algorithms(False)
    assert not timings.plans


def test_a_model_without_values_is_not_measured(timings: Timings) -> None:
    with torch.device("meta"):
        model = nn.Linear(6, 3)
    mw.best_plan(model, BATCH, global_batch=8, loss=nn.functional.cross_entropy, device="cpu")
    assert not timings.plans


def test_a_model_that_cannot_be_described_is_planned_without_measuring(timings: Timings) -> None:
    class Silent(nn.Linear):
        def extra_repr(self) -> str:
            raise RuntimeError("no description")

    options: dict[str, Any] = {"loss": nn.functional.cross_entropy, "device": "cpu"}
    assert mw.best_plan(Silent(6, 3), BATCH, global_batch=8, **options).world_size == 1
    assert not timings.plans


def test_the_budget_is_that_of_the_call(timings: Timings) -> None:
    best_plan(tune=7.5)
    assert timings.limits[0] == 7.5


@pytest.mark.parametrize("tune", [-1, math.nan, math.inf, "60", True])
def test_a_budget_that_is_no_number_of_seconds_is_refused(tune: Any) -> None:
    with pytest.raises(InputError, match=r"tune is .*: give a number of seconds, 0 to measure nothing, or None"):
        best_plan(tune=tune)


def test_a_budget_for_another_cluster_is_refused() -> None:
    with pytest.raises(InputError, match=r"tune is 5 and cluster is '8xH100': only the ranks that there are"):
        best_plan(tune=5, cluster="8xH100")


def test_steps_of_the_model_are_timed_and_everything_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = []
    time_here = in_process._time_here

    def noted(plan: Plan, *arguments: Any) -> Timing:
        if plan.compute.compile != "none":
            return Timing(1.0, 1.0, failure="not in this test")
        timing = time_here(plan, *arguments)
        failures.append(timing.failure)
        assert timing.step_s
        return timing

    monkeypatch.setattr(in_process, "_time_here", noted)
    model, optimizer = trained()
    before = everything(model, optimizer)
    options = {"loss": nn.functional.cross_entropy, "optimizer": optimizer, "device": "cpu", "tune": 300}
    plan = mw.best_plan(model, BATCH, global_batch=8, **options)
    assert failures == [None, None]
    assert is_same(everything(model, optimizer), before)
    session = mw.parallelize(model, optimizer, loss=nn.functional.cross_entropy, plan=plan, device="cpu")
    assert math.isfinite(float(session.step(BATCH)))


# ---- ranks


def best_plan_on_ranks(rank: int, size: int, cache: str, is_deterministic: bool) -> tuple[Plan, int, bool]:
    """For rank 0 the second variant is the fastest; its slowest rank makes it the slowest."""
    result = Timings(0.02, 0.01) if rank == 0 else Timings(0.02, 0.03)
    torch.use_deterministic_algorithms(is_deterministic and rank == 0)
    try:
        with (
            patch.dict("os.environ", {"XDG_CACHE_HOME": cache}),
            patch.object(choose, "find_cluster", machine),
            patch.object(in_process, "_time_here", result),
        ):
            plan = best_plan()
    finally:
        torch.use_deterministic_algorithms(False)
    return plan, len(result.plans), rank == 0


def test_all_ranks_take_the_variant_whose_slowest_rank_is_the_fastest(two: RankPool, tmp_path: Path) -> None:
    (plan, count, _), (other, other_count, _) = two.run(best_plan_on_ranks, str(tmp_path), False)
    assert plan == other
    assert not plan.compute.fused_optimizer
    assert plan.compute.compile == "none"
    assert count == other_count == 3
    again = two.run(best_plan_on_ranks, str(tmp_path), False)
    assert [(plan, count) for plan, count, _ in again] == [(plan, 0), (plan, 0)]


def test_if_rank_0_measures_nothing_no_rank_does(two: RankPool, tmp_path: Path) -> None:
    results = two.run(best_plan_on_ranks, str(tmp_path), True)
    assert [count for _, count, _ in results] == [0, 0]


def test_without_an_optimizer_plain_sgd_is_timed() -> None:
    model, _ = trained()
    to_tune = tuned.ModelToTune(model, BATCH, nn.functional.cross_entropy, None, None, 4, world())
    session = to_tune._session(Plan(), to_tune.world)
    assert type(session.optimizer) is torch.optim.SGD

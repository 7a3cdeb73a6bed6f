"""Ranks of another launcher tune the plan that rank 0 has chosen, and store it with the run."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from meshwright.auto.decision import Decision
from meshwright.auto.launched import PlanChooser
from meshwright.errors import UnequalPlan
from meshwright.job import Job, load_plan
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train import launched
from meshwright.train.output.folder import RunFolder
from meshwright.train.tuning import in_process
from meshwright.train.tuning.variants import Timing
from tests.auto.machines import cpu_cluster
from tests.ranks import RankPool
from tests.train.one_process import toy_job, world


def chosen_and_tuned(rank: int, size: int, cache: str, job: Job) -> tuple[Plan, list[Timing]]:
    """Returns the tuned plan, and what was timed on this rank. The eager variants are really timed, and those with a
    fused optimizer then count as faster."""
    timings: list[Timing] = []
    time_here = in_process._time_here

    def timed(plan: Plan, *arguments: Any) -> Timing:
        if plan.compute.compile != "none":
            return Timing(1.0, failure="not in this test")
        timing = time_here(plan, *arguments)
        timings.append(timing)
        step_s = None if timing.step_s is None else 1.0 - 0.5 * plan.compute.fused_optimizer
        return Timing(timing.seconds, step_s, timing.losses, timing.spread, timing.failure)

    chooser = PlanChooser(job)
    with patch.dict("os.environ", {"XDG_CACHE_HOME": cache}), patch.object(in_process, "_time_here", timed):
        found = Plan.model_validate({"axes": {"replicate": size}})
        if rank == 0:
            found = chooser(cpu_cluster(size), "never").plan
        plan = found if size == 1 else broadcast(found)
        return chooser.tune(plan, world(rank, size)).plan, timings


def broadcast(plan: Plan) -> Plan:
    from meshwright.messages.exchange import broadcast_value

    return Plan.model_validate(broadcast_value(plan.model_dump(mode="json")))


def long_job(**sections: Any) -> Job:
    return toy_job(**{"tune": 300, **sections})


def test_all_ranks_tune_the_plan_of_rank_0(two: RankPool, tmp_path: Path) -> None:
    (plan, timings), (other, other_timings) = two.run(chosen_and_tuned, str(tmp_path), long_job())
    assert plan == other
    assert plan.world_size == 2
    assert plan.compute.fused_optimizer
    for timing in (*timings, *other_timings):
        assert timing.failure is None
        assert timing.step_s
    assert len(timings) == len(other_timings) == 2
    again = two.run(chosen_and_tuned, str(tmp_path), long_job())
    assert again == [(plan, []), (plan, [])], "the next start does not measure again"


@pytest.mark.parametrize("sections", [{"tune": 0}, {"train": {"deterministic": True}}, {"allow": "same"}])
def test_jobs_that_are_not_tuned(tmp_path: Path, sections: dict[str, Any]) -> None:
    plan, timings = chosen_and_tuned(0, 1, str(tmp_path), long_job(**sections))
    assert not plan.compute.fused_optimizer
    assert not timings


def test_a_refused_plan_is_not_chosen_again() -> None:
    chooser = PlanChooser(long_job(), refuse=lambda _: None)
    plan = chooser(cpu_cluster(2), "never").plan
    with pytest.raises(UnequalPlan, match=f"auto finds no other plan than {plan.summary()}"):
        chooser(cpu_cluster(2), "never")


def test_a_plan_that_was_replaced_is_not_tuned(tmp_path: Path) -> None:
    chooser = PlanChooser(long_job())
    chooser(cpu_cluster(1), "never")
    other = Plan.model_validate({"memory": {"accumulation": 2}})
    assert chooser.tune(other, world()).plan == other


@pytest.mark.parametrize(("is_given", "is_faster"), [(False, True), (False, False), (True, True)])
def test_the_tuned_plan_is_stored_with_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, is_given: bool, is_faster: bool
) -> None:
    fused = Plan.model_validate({"compute": {"fused_optimizer": is_faster}})
    trained: list[Plan] = []

    def train_rank(job: Job, plan: Plan, folder: RunFolder, *_: Any) -> bool:
        trained.extend([plan, load_plan(folder.plan)])
        return False

    def tune(plan: Plan, _: World) -> Decision:
        return Decision(fused, {"compute.fused_optimizer": "measured"})

    monkeypatch.setattr(launched, "train_rank", train_rank)
    monkeypatch.setattr(launched, "redirect", lambda *_: None)
    job = toy_job(output=str(tmp_path))
    plan = Plan() if is_given else lambda *_: Decision(Plan(), {"compute.fused_optimizer": "found"})
    heartbeat = launched.Heartbeat.in_memory()
    monkeypatch.setattr(heartbeat, "move_to", lambda *_: None)
    launched.train_in_world(job, plan, cpu_cluster(1), "never", world(), heartbeat, 0, tune=tune)
    assert trained == ([Plan(), Plan()] if is_given else [fused, fused])
    reasons = [yaml.safe_load(file.read_text()) for file in tmp_path.glob("*/reasons.yaml")]
    assert reasons == ([] if is_given else [{"compute.fused_optimizer": "measured"}])

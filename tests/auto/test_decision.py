"""Every field of a plan has a reason, which is true."""

from typing import Any

import pytest

from meshwright.auto.decide import UNSEARCHED, decide, plan_of_job
from meshwright.auto.decision import WRITTEN, Decision, changes
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import FIELDS, default_of
from meshwright.plan_fields.groups import Axes
from meshwright.train.job_parts import JobParts
from tests.auto.machines import cpu_cluster
from tests.train.one_process import toy_job


def searched(cluster: Any, **sections: Any) -> Decision:
    return plan_of_job(JobParts(toy_job(**sections)), cluster, "auto")


@pytest.mark.parametrize("cluster", ["2xcpu", "2x8xA100-80GB", "2xH100+2xL4"])
@pytest.mark.parametrize("allow", ["same", "changes"])
def test_the_search_changes_only_fields_that_it_is_said_to_change(cluster: str, allow: str) -> None:
    machines = cpu_cluster(2) if cluster == "2xcpu" else find_cluster(cluster)
    decision = searched(machines, allow=allow)
    assert list(decision.reasons) == list(FIELDS)
    for name, reason in decision.reasons.items():
        group, _, own = name.partition(".")
        if getattr(getattr(decision.plan, group), own) != default_of(name):
            assert reason.startswith("as in the fastest of "), (name, reason)
            assert name not in UNSEARCHED


def test_constraints_and_given_plans_are_reasons() -> None:
    fixed = searched(cpu_cluster(2), constraints={"fix": {"axes.shard": 2}})
    assert fixed.reasons["axes.shard"] == "fixed by the constraints"
    named = plan_of_job(JobParts(toy_job()), cpu_cluster(2), Plan(axes=Axes(replicate=2)))
    assert named.reasons["axes.replicate"] == WRITTEN
    assert named.reasons["axes.shard"] == "the default"
    assert named.reasons["axes.expert"] == "the default"


def test_a_changed_plan_has_a_reason_for_what_has_changed() -> None:
    before = Decision(Plan(), dict.fromkeys(FIELDS, "before"))
    after = Plan.model_validate({"numerics": {"precision": "bf16"}, "axes": {"shard": 2}})
    assert changes(Plan(), after) == ["axes.shard", "numerics.precision"]
    reasons = before.changed(after, "measured").reasons
    assert {name for name, reason in reasons.items() if reason == "measured"} == {"axes.shard", "numerics.precision"}


def test_the_precision_that_is_measured_is_part_of_the_decision(capsys: pytest.CaptureFixture[str]) -> None:
    auto = Plan.model_validate({"numerics": {"precision": "auto"}})
    decision = decide(JobParts(toy_job(tune=0)), find_cluster("1xcpu"), auto)
    assert decision.plan.numerics.precision != "auto"
    assert decision.reasons["numerics.precision"].startswith("precision ")
    assert decision.reasons["numerics.precision"] in capsys.readouterr().err

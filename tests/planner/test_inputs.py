"""For plans on this machine the model's operators are measured on it; plans for other machines measure nothing."""

from typing import Any

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.planner import inputs as planning
from meshwright.planner.inputs import PlanningInputs, with_measured_operators
from meshwright.profile.values import ModelProfile
from tests.planner.cases import MOMENTUM, one_layer


def test_every_precision_is_measured_as_a_replica_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, str, int]] = []

    def measured(cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int) -> Cluster:
        seen.append((plan.numerics.precision, plan.axes.replicate, profile.precision, global_batch))
        return cluster.model_copy(update={"name": "measured"})

    monkeypatch.setattr(planning, "is_this_machine", lambda cluster: True)
    monkeypatch.setattr(planning, "measure_model_operators", measured)
    inputs = PlanningInputs(find_cluster("2xH100"), 8, MOMENTUM, precisions=("bf16", "fp32"))
    assert with_measured_operators(inputs, one_layer()).cluster.name == "measured"
    assert seen == [("bf16", 2, "bf16", 8), ("fp32", 2, "fp32", 8)]


def test_another_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Cluster:
        return pytest.fail("another machine's operators are measured here")

    monkeypatch.setattr(planning, "measure_model_operators", nothing)
    inputs = PlanningInputs(find_cluster("2xH100"), 8, MOMENTUM)
    assert with_measured_operators(inputs, one_layer()) is inputs

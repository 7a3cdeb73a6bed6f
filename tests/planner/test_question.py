"""Questions about this machine are asked with the model's own operators measured on it; others are left alone."""

from typing import Any

import pytest

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find
from meshwright.plan import Plan
from meshwright.planner import question as asked
from meshwright.planner.question import Question, with_own_operators
from meshwright.profile.values import ModelProfile
from tests.planner.questions import MOMENTUM, one_layer


def test_every_precision_is_measured_as_a_replica_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int, str, int]] = []

    def measured(cluster: Cluster, profile: ModelProfile, plan: Plan, global_batch: int) -> Cluster:
        seen.append((plan.numerics.precision, plan.axes.replicate, profile.precision, global_batch))
        return cluster.model_copy(update={"name": "measured"})

    monkeypatch.setattr(asked, "is_here", lambda cluster: True)
    monkeypatch.setattr(asked, "with_own_shapes", measured)
    question = Question(find("2xH100"), 8, MOMENTUM, precisions=("bf16", "fp32"))
    assert with_own_operators(question, one_layer()).cluster.name == "measured"
    assert seen == [("bf16", 2, "bf16", 8), ("fp32", 2, "fp32", 8)]


def test_another_machine_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any) -> Cluster:
        return pytest.fail("another machine's operators are measured here")

    monkeypatch.setattr(asked, "with_own_shapes", nothing)
    question = Question(find("2xH100"), 8, MOMENTUM)
    assert with_own_operators(question, one_layer()) is question

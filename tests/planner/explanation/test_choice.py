"""The line at the top of a run says which plan was chosen, what its variant gains, and what a larger `allow` gains."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import meshwright.planner.explanation.choice
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.plan_fields.effects import Numerics
from meshwright.planner.explanation.choice import describe_choice
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search import search
from meshwright.simulator.predict import Prediction, predict_plan
from tests.auto.machines import cpu_cluster
from tests.planner.cases import MOMENTUM, one_layer, predict_as

H100 = PlanningInputs(find_cluster("1xH100"), 8, MOMENTUM, can_fuse_optimizer=True)


@cache
def some_prediction() -> Prediction:
    return predict_plan(find_cluster("1xH100"), one_layer().get("fp32", "none"), Plan(), 8, MOMENTUM)


def predict(*arguments: Any, **_: Any) -> Prediction:
    """A step of 12 ms in fp32 and of 6 ms in bf16, of which a fused optimizer saves 2 ms."""
    plan: Plan = arguments[2]
    step_ms = (6 if plan.numerics.precision == "bf16" else 12) - 2 * plan.compute.fused_optimizer
    return replace(some_prediction(), step_s=step_ms / 1000)


def line(inputs: PlanningInputs, monkeypatch: pytest.MonkeyPatch, trace_s: float = 0.0) -> str:
    predict_as(monkeypatch, predict)
    monkeypatch.setattr(meshwright.planner.explanation.choice, "predict_plan", predict)
    profiles = one_layer()
    result = search(inputs, profiles)
    profiles.trace_s = trace_s
    return describe_choice(result, inputs, profiles)


@pytest.mark.parametrize(
    ("allow", "words"),
    [
        ("same", "one rank · fp32, 12 ms a step predicted; with allow: rounding, fused optimizer would take 10 ms"),
        (
            "rounding",
            "one rank · fp32 · fused optimizer, 10 ms a step predicted (12 ms without fused optimizer);"
            " with allow: changes, bf16 would take 4 ms",
        ),
        ("changes", "one rank · bf16 · fused optimizer, 4 ms a step predicted (6 ms without fused optimizer)"),
    ],
)
def test_the_line_says_what_was_chosen_why_and_what_one_word_more_would_gain(
    allow: Numerics, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert line(replace(H100, allow=allow), monkeypatch) == f"plan: {words}"


def test_another_precision_is_not_traced_if_that_takes_longer_than_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    assert line(replace(H100, allow="rounding"), monkeypatch, trace_s=1e9).endswith("(12 ms without fused optimizer)")


def test_nothing_is_said_about_words_that_gain_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = PlanningInputs(cpu_cluster(1), 8, MOMENTUM, allow="same")
    assert line(inputs, monkeypatch) == "plan: one rank · fp32, 12 ms a step predicted"

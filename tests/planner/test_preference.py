"""A plan that is predicted to be faster by less than the error of predictions is not chosen over a simpler one."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.planner.explanation.choice import describe_choice
from meshwright.planner.explanation.explain import explain
from meshwright.planner.preference import ERROR, complexity, describe_preference, preferred, simplicity
from meshwright.simulator.predict import Prediction, predict_plan
from tests.planner.cases import MOMENTUM, one_layer, predict_as, search_plans
from validation.stated_accuracy import stated_accuracies

PLAIN: dict[str, Any] = {"axes": {"replicate": 2}}
ACCUMULATED = {**PLAIN, "memory": {"accumulation": 4}}
FUSED = {**PLAIN, "compute": {"fused_optimizer": True}}
SHARDED = {"axes": {"shard": 2}}


def predicted(groups: dict[str, Any], **breakdown: float) -> tuple[Plan, Prediction]:
    plan = Plan.model_validate(groups)
    prediction = predict_plan(find_cluster("2xH100"), one_layer().get("fp32", "none"), Plan(), 8, MOMENTUM)
    terms = {**dict.fromkeys(prediction.breakdown, 0.0), **breakdown}
    return plan, replace(prediction, step_s=sum(terms.values()), breakdown=terms)


def preferred_of(*plans: tuple[Plan, Prediction]) -> Plan:
    return plans[preferred(plans)][0]


def test_a_simpler_plan_is_preferred_within_the_error_of_predictions() -> None:
    plain, close = predicted(PLAIN, compute=1.0), predicted(ACCUMULATED, compute=0.985)
    assert preferred_of(plain, close) == preferred_of(close, plain) == plain[0]
    much_faster = predicted(ACCUMULATED, compute=0.9)
    assert preferred_of(plain, much_faster) == much_faster[0]
    assert preferred_of(plain, close, much_faster) == much_faster[0]
    assert preferred_of(close, much_faster) == much_faster[0], "of equally simple plans the fastest is preferred"


def test_only_the_time_in_which_plans_differ_has_an_error_that_matters() -> None:
    plain = predicted(PLAIN, compute=1.0, optimizer=0.1)
    assert preferred_of(plain, predicted(FUSED, compute=1.0, optimizer=0.05)).compute.fused_optimizer
    assert not preferred_of(plain, predicted(FUSED, compute=1.0, optimizer=0.095)).compute.fused_optimizer
    assert not preferred_of(plain, predicted(FUSED, compute=0.985, optimizer=0.1)).compute.fused_optimizer


@pytest.mark.parametrize(("model_s", "compiled"), [(0.995, "blocks"), (0.97, "model")])
def test_the_whole_model_is_compiled_if_that_is_faster_by_a_percent(model_s: float, compiled: str) -> None:
    blocks, model = (
        predicted({"compute": {"compile": what}}, compute=seconds)
        for what, seconds in (("blocks", 1.0), ("model", model_s))
    )
    assert preferred_of(blocks, model, predicted({}, compute=1.5)).compute.compile == compiled


def test_nothing_that_saves_more_than_two_percent_is_given_up() -> None:
    plain, faster = predicted(PLAIN, compute=1.0), predicted(ACCUMULATED, compute=0.97)
    assert preferred_of(plain, faster) == faster[0]


def test_fewer_axes_are_simpler_then_fewer_fields_then_shards() -> None:
    pipeline = {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 4, "cuts": ["a"]}}
    plans = [
        *({}, PLAIN, SHARDED, {"axes": {"tensor": 2}}, pipeline, ACCUMULATED, {**SHARDED, **ACCUMULATED, **FUSED}),
        {"axes": {"replicate": 2, "shard": 2}},
    ]
    order = [simplicity(Plan.model_validate(groups)) for groups in plans]
    assert order == sorted(order)
    assert len(set(order[1:])) == len(order) - 1


def test_the_fields_that_count_are_those_that_a_user_has_to_know() -> None:
    def count(groups: dict[str, Any]) -> int:
        return complexity(Plan.model_validate(groups))

    assert count({}) == count(PLAIN) == count(SHARDED) == 0
    assert count(ACCUMULATED) == count(FUSED) == 1
    assert count({**SHARDED, "memory": {"sharding": "optimizer", "recompute": "full"}}) == 1
    assert count({"compute": {"cuda_graphs": True}}) == 0, "CUDA graphs gain most where predictions are least certain"
    assert count({"compute": {"compile": "blocks"}}) == count({"compute": {"compile": "model"}}) == 1
    assert count({"numerics": {"precision": "bf16"}, "compute": {"layout": "channels_last"}}) == 1
    two_stages = {"axes": {"pipeline": 2}, "pipeline": {"microbatches": 4, "cuts": ["a"]}}
    four_stages = {"axes": {"pipeline": 2}, "pipeline": {"schedule": "interleaved_1f1b", "cuts": ["a", "b", "c"]}}
    assert (count(two_stages), count(four_stages)) == (0, 2)


def test_the_error_is_one_that_the_documentation_states() -> None:
    steps = stated_accuracies()["steps on one H200"].figures
    stated = [figure.stated for figure in steps.values()]
    assert min(stated) < ERROR < max(stated)


def test_the_reason_names_what_was_left_out_its_gain_and_the_error() -> None:
    plain, close = predicted(PLAIN, compute=1.0), predicted(ACCUMULATED, compute=0.985)
    assert describe_preference(*plain, close) == (
        "within 2% of the fastest, and simpler: accumulate 4 is predicted to be 1.5% faster"
    )


@pytest.mark.parametrize(("accumulated_s", "accumulation"), [(0.985, 1), (0.9, 4)])
def test_the_search_takes_the_preferred_plan_and_says_why(
    monkeypatch: pytest.MonkeyPatch, accumulated_s: float, accumulation: int
) -> None:
    def predict_toy(*arguments: Any, **_: Any) -> Prediction:
        plan: Plan = arguments[2]
        compute = accumulated_s if plan.memory.accumulation == 4 else 1.0
        return predicted({}, compute=compute, shard=float(plan.axes.shard > 1))[1]

    predict_as(monkeypatch, predict_toy)
    inputs, result = search_plans("2xH100", one_layer(), 8, allow="same")
    assert result.ranked[0].plan.memory.accumulation == accumulation
    assert result.ranked[0] in result.family_bests
    assert result.fastest is not None
    assert result.fastest.plan.memory.accumulation == 4
    others = [priced.prediction.step_s for priced in result.ranked[1:]]
    assert others == sorted(others)
    reason = "within 2% of the fastest, and simpler: accumulate 4 is predicted to be 1.5% faster"
    for text in (" ".join(explain(result, inputs)), describe_choice(result, inputs, one_layer())):
        assert (reason in text) == (accumulation == 1)

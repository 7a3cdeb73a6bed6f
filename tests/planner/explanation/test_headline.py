"""The first line of an answer, and the plain plans that the best one is compared with."""

from dataclasses import replace

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.numbers.units import words_text
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import make_constraints
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.explanation.plain import PlainPlan
from meshwright.planner.explanation.report import PlanReport, predict_given_plan, report_search
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.search import search
from meshwright.planner.search_result import SearchResult
from meshwright.simulator.predict import predict_plan
from tests.planner.cases import ADAMW, cluster_with, small_decoder

TOKENS = 256


def reported(inputs: PlanningInputs) -> tuple[SearchResult, PlanReport]:
    profiles = small_decoder()
    result = search(inputs, profiles)
    return result, report_search(result, inputs, profiles)


def test_the_first_line_has_the_figures_that_people_compare() -> None:
    inputs = PlanningInputs(find_cluster("4xH100"), 64, ADAMW)
    result, report = reported(inputs)
    line, best = report.headline, result.ranked[0]
    weights = sum(parameter.numel() for parameter in small_decoder().model.parameters())
    assert line.parameters == weights
    assert line.samples_per_s == pytest.approx(64 / best.prediction.step_s)
    assert line.tokens_per_s is not None
    assert line.tokens_per_s == pytest.approx(TOKENS * line.samples_per_s)
    assert line.mfu is not None
    matrices = 6 * weights * line.tokens_per_s / (4 * inputs.device.rates["bf16"])  # attention comes on top of it
    assert matrices * 0.95 < line.mfu < matrices * 1.25
    text = str(line)
    assert text.startswith(f"{words_text(weights)} parameters, {words_text(line.tokens_per_s)} tokens/s (")
    assert f"{line.mfu:.1%} of the peak rate in bf16 (MFU)" in text
    assert "of the 79.6 GiB of one H100" in text


def test_recomputation_is_no_part_of_the_share_of_the_peak_rate() -> None:
    inputs = PlanningInputs(find_cluster("4xH100"), 64, ADAMW)
    plans = [
        Plan.model_validate({"axes": {"replicate": 4}, "memory": {"recompute": level}}) for level in ("none", "full")
    ]
    lines = [predict_given_plan(plan, inputs, small_decoder()).headline for plan in plans]
    mfu = [line.mfu for line in lines]
    assert mfu[0] is not None
    assert mfu[1] is not None
    assert mfu[1] / mfu[0] == pytest.approx(lines[1].samples_per_s / lines[0].samples_per_s)


def test_an_answer_says_that_other_programs_disturbed_the_measurement() -> None:
    idle = PlanningInputs(find_cluster("4xH100"), 64, ADAMW)
    busy = replace(idle, cluster=idle.cluster.model_copy(update={"busy_cores": 1.5}))
    words = "Other programs used 1.5 of"
    plan = Plan.model_validate({"axes": {"replicate": 4}})
    assert words in " ".join(predict_given_plan(plan, busy, small_decoder()).explanation)
    assert words not in " ".join(predict_given_plan(plan, idle, small_decoder()).explanation)
    assert (
        "while other programs used 1.5" in predict_given_plan(plan, busy, small_decoder()).to_dict()["best"]["based_on"]
    )


def test_plain_plans_are_compared_with_and_are_part_of_the_answer() -> None:
    result, report = reported(PlanningInputs(find_cluster("2x4xH100"), 64, ADAMW))
    by_name = {plain.name: plain for plain in report.headline.plain}
    assert set(by_name) == {"plain DDP", "plain FSDP", "hybrid FSDP"}
    best = result.ranked[0]
    for plain in by_name.values():
        assert plain.priced is not None
        assert plain.times == pytest.approx(plain.priced.prediction.step_s / best.prediction.step_s)
        assert plain.words in str(report.headline)
        axes = plain.priced.plan.axes
        assert axes.tensor == axes.pipeline == axes.context == 1
    assert [entry["name"] for entry in report.to_dict()["plain"]] == [plain.name for plain in report.headline.plain]
    own = [plain for plain in by_name.values() if plain.is_best]
    assert len(own) <= 1
    assert all(plain.priced is best for plain in own)


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (PlainPlan("plain DDP", None, 1.0, is_best=True), "this is plain DDP"),
        (PlainPlan("plain FSDP", None, 1.404), "1.40 times as fast as plain FSDP"),
        (PlainPlan("plain FSDP", None, 1.001), "as fast as plain FSDP"),
        (PlainPlan("plain FSDP", None, 2100.4), "2,100 times as fast as plain FSDP"),
        (PlainPlan("plain DDP", None, None, 2.0**33), "plain DDP does not fit: it needs 8 GiB"),
    ],
)
def test_how_a_comparison_reads(plain: PlainPlan, words: str) -> None:
    assert plain.words == words


def test_what_does_not_fit_is_rejected_with_what_it_needs_and_not_with_a_bound() -> None:
    cluster = cluster_with("4xH100", memory_bytes=2 * 2**30)
    inputs = PlanningInputs(cluster, 64, ADAMW)
    result, report = reported(inputs)
    assert result.excluded
    for excluded in result.excluded:
        plan = excluded.plan
        profile = small_decoder().get(plan.numerics.precision, plan.memory.recompute)
        prediction = predict_plan(cluster, profile, plan, 64, ADAMW, runtime=inputs.runtime)
        assert prediction.memory.device_bytes > excluded.needed_bytes
        words = next(reason for rejected, reason in report.rejected if rejected == plan)
        assert f"needs {prediction.memory.device_bytes / 2**30:.3g} GiB, more than the" in words
    assert "plain DDP does not fit: it needs" in str(report.headline)


def test_constraints_leave_out_the_plain_plans_that_they_exclude() -> None:
    inputs = PlanningInputs(find_cluster("4xH100"), 64, ADAMW)
    _, report = reported(constrained(inputs, make_constraints(avoid=["shard"])))
    assert [plain.name for plain in report.headline.plain] == ["plain DDP"]


def test_one_device_is_compared_with_nothing() -> None:
    _, report = reported(replace(PlanningInputs(find_cluster("1xH100"), 8, ADAMW), top=1))
    assert report.headline.plain == ()
    assert str(report.headline).endswith("of one H100")

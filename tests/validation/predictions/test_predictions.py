"""Published runs are predicted without help of their own source, ordered, scored and reported."""

from dataclasses import replace

import pytest

from meshwright.simulator.compute.operator_time import device_speeds
from tests.soaked import all_but
from validation.predictions.fit import fit
from validation.predictions.predict import (
    PredictedCase,
    cluster_of,
    engine_of,
    fits,
    generation,
    predict_case,
    traced,
)
from validation.predictions.report import WIDEST_SPREAD, as_json, make_report
from validation.predictions.report_text import markdown, table_lines
from validation.predictions.score import Alarms, Errors, alarms, errors_of, order_of, spread
from validation.runs.case import PublishedCase
from validation.runs.cover import Coverage, case_of, cover
from validation.runs.features import feature_of
from validation.runs.related_sources import publisher
from validation.runs.rows import rows


def case(name: str) -> PublishedCase:
    return case_of(next(row for row in rows() if row.id == name))


def prediction_of(name: str, source: str, ratio: float, launch_share: float = 0.0) -> PredictedCase:
    """A prediction whose measured step time is `ratio` times the predicted one, as if the row came from `source`. The
    device waits for its host during `launch_share` of the step."""
    renamed = replace(case(name), id=f"{source}-{name}", source=source)
    assert renamed.step_s is not None
    step_s = renamed.step_s / ratio
    return PredictedCase(renamed, step_s, {"launch": launch_share * step_s})


@pytest.mark.parametrize("name", all_but([], [f"megatron_sc21_table1-000{n}" for n in (6, 7)]))
def test_the_published_76b_and_145b_runs_are_predicted_without_any_factor(name: str) -> None:
    run = case(name)
    assert run.step_s is not None
    assert predict_case(run, traced).step_s == pytest.approx(run.step_s, rel=0.15)


def test_a_launch_factor_is_fitted_to_unrelated_sources_alone() -> None:
    name = "megatron_sc21_table1-0006"
    predictions = [
        prediction_of(name, "one", 1.44, 0.5),
        prediction_of(name, "two", 1.44, 0.5),
        prediction_of(name, "three", 1.9, 0.5),
    ]
    factors = fit(predictions)
    assert factors["three"].launch == pytest.approx(1.44 ** (2 / 3)), "two votes agree, and the reference votes for 1"
    assert factors["three"].votes == 2
    assert factors["one"].launch > factors["three"].launch, "the vote of three is larger than that of one"
    assert fit(predictions[:1])["one"].launch == 1.0
    related = fit([prediction_of(name, "lambda_v1", 1.4, 0.5), prediction_of(name, "lambda_v2", 1.0, 0.5)])
    assert related["lambda_v2"].launch == 1.0, "a related source has no vote"
    untrusted = fit([prediction_of(name, "bigscience_v100_gpt2", 1.4, 0.5), prediction_of(name, "two", 1.0, 0.5)])
    assert untrusted["two"].launch == 1.0, "a source that its author does not trust has no vote"


def test_a_source_has_one_vote_and_only_from_rows_that_wait_for_the_host() -> None:
    name = "megatron_sc21_table1-0006"
    many = [prediction_of(name, "one", ratio, 0.5) for ratio in (1.2, 1.21, 1.3)]
    assert fit([*many, prediction_of(name, "two", 1.0)])["two"].launch == pytest.approx(1.21**0.5), (
        "one vote: its median"
    )
    related = [prediction_of(name, "lambda_v1", 1.21, 0.5), prediction_of(name, "lambda_v2", 1.21, 0.5)]
    assert fit([*related, prediction_of(name, "two", 1.0)])["two"].votes == 1
    busy = fit([prediction_of(name, "one", 1.4), prediction_of(name, "two", 1.0)])
    assert busy["two"].launch == 1.0, "rows in which the device does not wait for its host have no vote"
    far = fit([prediction_of(name, "one", 2.5, 0.5), prediction_of(name, "two", 1.0)])
    assert far["two"].launch == 1.0, "rows with so large an error have no vote"


def test_an_engine_follows_what_its_row_states() -> None:
    old, new = case("megatron_sc21_table1-0006"), case("torchtitan_h100-0002")
    assert engine_of(old).writes_scores
    assert not engine_of(new).writes_scores
    assert engine_of(new).fused, "it was compiled"
    assert engine_of(new).attention_slowdown > 1, "the second FlashAttention on Hopper"
    assert engine_of(old, launch_factor=1.5).launch_factor == 1.5
    assert generation(new.cluster) == "Hopper"


def test_orders_and_errors() -> None:
    members = [replace(case(f"vtrain_multi-00{number}"), family="one") for number in (14, 17, 18)]
    measured = {member.id: member.step_s or 0.0 for member in members}
    order = order_of(members, measured)
    assert order is not None
    assert order.tau == order.median_tau == 1.0
    backwards = order_of(members, {name: 1 / step_s for name, step_s in measured.items()})
    assert backwards is not None
    assert backwards.tau == -1.0
    errors = errors_of(members, {name: 1.1 * step_s for name, step_s in measured.items()})
    assert errors.median == pytest.approx(errors.p90) == pytest.approx(0.1)


def test_a_source_that_contradicts_itself_is_shown_and_not_judged() -> None:
    cases = [run for run in cover().cases if feature_of(run) is None]
    spreads = {source: spread(run for run in cases if run.source == source) for source in {run.source for run in cases}}
    assert {source for source, ratio in spreads.items() if ratio > WIDEST_SPREAD} == {"bigscience_v100_gpt2"}
    assert spreads["bigscience_v100_gpt2"] == 225 / 125
    run = case("vtrain_single-0023")
    slower = replace(run, id="again", step_s=1.5 * (run.step_s or 0))
    assert spread((run, slower)) == pytest.approx(1.5)
    assert spread((run, replace(slower, global_batch=1 + run.global_batch))) == 1, "these are different cases"
    assert spread(()) == 1


def test_alarms_are_counted_on_rows_that_ran() -> None:
    ran, failed = case("bigscience_a100-0095"), case("bigscience_a100-0092")
    counts = alarms([ran, failed], {ran.id: False, failed.id: False})
    assert (counts.ran, counts.false_alarms, counts.failed, counts.called) == (1, 1, 1, 1)


@pytest.mark.soak
def test_the_report_names_every_row_that_is_left_out() -> None:
    cases = tuple(map(case, ("vtrain_single-0023", "vtrain_single-0064", "sailor_clariden-0013")))
    report = make_report(coverage=Coverage(cases, {"other-1": "a reason"}))
    assert [score.rows for score in report.scores] == [2, 1]
    assert report.reasons == {"other-1": "a reason"}
    totals = report.overall()
    assert (totals["sources"], totals["rows"], totals["every_rows"]) == (2, 3, 3)
    disputed = replace(report, scores=(report.scores[0], replace(report.scores[1], spread=1.7)))
    assert (disputed.overall()["sources"], disputed.overall()["rows"], disputed.overall()["every_rows"]) == (1, 2, 3)
    not_judged = "not judged: two measurements of one case differ by a factor of 1.7"
    assert any(not_judged in line for line in table_lines(as_json(disputed)))
    inaccurate = replace(
        report.scores[0],
        fitted_errors=Errors(1, 0.3, 0.4),
        guess_errors=Errors(1, 0.5, 0.5),
        order=None,
        alarms=Alarms(10, 1, 2, 1),
    )
    assert inaccurate.missed() == ("median", "p90", "skill", "alarms", "calls")
    content = as_json(report)
    assert set(content) == {"rows", "summary", "not_covered"}
    document = markdown(content, every_row=False)
    assert "| 1 | other | a reason |" in document
    assert "| vtrain_single | VIA-Research/vTrain | 2 |" in document
    assert document == markdown(as_json(report), every_row=False)


@pytest.mark.soak
def test_a_run_that_was_out_of_memory_is_predicted_to_be() -> None:
    assert not fits(case("bigscience_a100-0092"), traced)
    assert fits(case("bigscience_a100-0095"), traced)


def test_rates_that_a_source_published_do_not_predict_its_own_rows() -> None:
    """The catalog has two published sustained shares of a B200; SimuMax's rows are predicted with the other's alone."""
    name = "8xB200"
    catalog, reduced = cluster_of(name).nodes[0].device, cluster_of(name, publisher("simumax_b200")).nodes[0].device
    rate = {
        "all": device_speeds(catalog, "bf16").rates["bf16"],
        "without": device_speeds(reduced, "bf16").rates["bf16"],
    }
    assert rate["without"] == pytest.approx(0.634 * 2250e12)
    assert rate["all"] == pytest.approx((0.634 * 0.488) ** 0.5 * 2250e12)
    assert publisher("colossalai") is None

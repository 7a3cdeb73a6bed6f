"""`bench predictions`: published plans are predicted, ordered and left out of their own calibration."""

from dataclasses import replace

import pytest

from meshwright.simulator.compute.operator_time import device_speeds
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
from validation.predictions.report import WIDEST_SPREAD, as_json, lines, report
from validation.predictions.score import Alarms, Errors, alarms, errors_of, order_of, spread
from validation.runs.case import PublishedCase
from validation.runs.cover import Coverage, case_of, cover
from validation.runs.related_sources import publisher
from validation.runs.rows import rows


def case(name: str) -> PublishedCase:
    return case_of(next(row for row in rows() if row.id == name))


def guessed(name: str, source: str, ratio: float, waiting: float = 0.0) -> PredictedCase:
    """One whose measured step is so many times the predicted."""
    made = replace(case(name), id=f"{source}-{name}", source=source)
    assert made.step_s is not None
    step_s = made.step_s / ratio
    return PredictedCase(made, step_s, {"launch": waiting * step_s})


@pytest.mark.parametrize("name", ["megatron_sc21_table1-0006", "megatron_sc21_table1-0007"])
def test_the_published_76b_and_145b_runs_are_predicted_without_any_factor(name: str) -> None:
    found = case(name)
    assert found.step_s is not None
    assert predict_case(found, traced).step_s == pytest.approx(found.step_s, rel=0.15)


def test_the_hosts_pace_comes_from_strangers_alone() -> None:
    name = "megatron_sc21_table1-0006"
    known = [guessed(name, "one", 1.44, 0.5), guessed(name, "two", 1.44, 0.5), guessed(name, "three", 1.9, 0.5)]
    found = fit(known)
    assert found["three"].launch == pytest.approx(1.44 ** (2 / 3)), "two agree, and the reference has a vote"
    assert found["three"].votes == 2
    assert found["one"].launch > found["three"].launch, "one of its voices is louder"
    assert fit(known[:1])["one"].launch == 1.0
    kin = fit([guessed(name, "lambda_v1", 1.4, 0.5), guessed(name, "lambda_v2", 1.0, 0.5)])
    assert kin["lambda_v2"].launch == 1.0, "of its kin nothing is taken"
    low = fit([guessed(name, "bigscience_v100_gpt2", 1.4, 0.5), guessed(name, "two", 1.0, 0.5)])
    assert low["two"].launch == 1.0, "what its own author does not trust calibrates nothing"


def test_a_source_has_one_vote_and_only_where_its_host_is_waited_for() -> None:
    name = "megatron_sc21_table1-0006"
    many = [guessed(name, "one", ratio, 0.5) for ratio in (1.2, 1.21, 1.3)]
    assert fit([*many, guessed(name, "two", 1.0)])["two"].launch == pytest.approx(1.21**0.5), "its median, once"
    kin = [guessed(name, "lambda_v1", 1.21, 0.5), guessed(name, "lambda_v2", 1.21, 0.5)]
    assert fit([*kin, guessed(name, "two", 1.0)])["two"].votes == 1
    busy = fit([guessed(name, "one", 1.4), guessed(name, "two", 1.0)])
    assert busy["two"].launch == 1.0, "what the device takes is no matter of its host"
    far = fit([guessed(name, "one", 2.5, 0.5), guessed(name, "two", 1.0)])
    assert far["two"].launch == 1.0, "so far off, it tells of something else"


def test_engines_are_what_rows_say() -> None:
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
    known = cover().cases
    spreads = {source: spread(one for one in known if one.source == source) for source in {one.source for one in known}}
    assert {source for source, ratio in spreads.items() if ratio > WIDEST_SPREAD} == {"bigscience_v100_gpt2"}
    assert spreads["bigscience_v100_gpt2"] == 225 / 125
    one = case("vtrain_single-0023")
    twice = (one, replace(one, id="again", step_s=1.5 * (one.step_s or 0)))
    assert spread(twice) == pytest.approx(1.5)
    assert spread((one, replace(twice[1], global_batch=1 + one.global_batch))) == 1, "another case"
    assert spread(()) == 1


def test_alarms_are_counted_on_rows_that_ran() -> None:
    ran, failed = case("bigscience_a100-0095"), case("bigscience_a100-0092")
    found = alarms([ran, failed], {ran.id: False, failed.id: False})
    assert (found.ran, found.false_alarms, found.failed, found.called) == (1, 1, 1, 1)


def test_the_report_names_every_row_that_is_left_out() -> None:
    chosen = tuple(map(case, ("vtrain_single-0023", "vtrain_single-0064", "sailor_clariden-0013")))
    made = report(coverage=Coverage(chosen, {"other-1": "a reason"}))
    assert [score.rows for score in made.scores] == [2, 1]
    assert made.reasons == {"other-1": "a reason"}
    whole = made.overall()
    assert (whole["sources"], whole["rows"], whole["every_rows"]) == (2, 3, 3)
    disputed = replace(made, scores=(made.scores[0], replace(made.scores[1], apart=1.7)))
    assert (disputed.overall()["sources"], disputed.overall()["rows"], disputed.overall()["every_rows"]) == (1, 2, 3)
    assert any("not judged: one case 1.7 times apart" in line for line in lines(disputed))
    off = replace(
        made.scores[0], fitted=Errors(1, 0.3, 0.4), guessed=Errors(1, 0.5, 0.5), order=None, alarms=Alarms(10, 1, 2, 1)
    )
    assert off.missed() == ("median", "p90", "skill", "alarms", "calls")
    assert set(as_json(made)) == {"rows", "summary", "not_covered"}
    assert any("a reason" in line for line in lines(made))


@pytest.mark.soak
def test_what_was_out_of_memory_is_called() -> None:
    assert not fits(case("bigscience_a100-0092"), traced)
    assert fits(case("bigscience_a100-0095"), traced)


def test_what_a_source_measured_of_its_gpus_is_left_out_where_it_is_reported_on() -> None:
    """Both published shares of a B200 make the catalog's; SimuMax's own rows go by the other one alone."""
    name = "8xB200"
    everybody, own = cluster_of(name).nodes[0].device, cluster_of(name, publisher("simumax_b200")).nodes[0].device
    rate = {"all": device_speeds(everybody, "bf16").rates["bf16"], "without": device_speeds(own, "bf16").rates["bf16"]}
    assert rate["without"] == pytest.approx(0.634 * 2250e12)
    assert rate["all"] == pytest.approx((0.634 * 0.488) ** 0.5 * 2250e12)
    assert publisher("colossalai") is None

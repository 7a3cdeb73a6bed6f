"""The guess to beat, and the families that a predictor must rank."""

from functools import cache

import pytest

from validation.runs.baseline import Point, errors, guess, points
from validation.runs.case import Case
from validation.runs.cover import cover
from validation.runs.families import families
from validation.runs.reading.flops import DECODER


@cache
def decoders() -> tuple[Case, ...]:
    return tuple(case for case in cover().cases if case.model.call == DECODER)


@cache
def known() -> tuple[Point, ...]:
    return points(decoders())


def test_the_share_of_the_peak_is_that_of_the_publication() -> None:
    """44% and 50% of 312 TFLOP/s, by the paper's own count."""
    shares = {point.case.id: point.share for point in known()}
    assert shares["megatron_sc21_table1-0002"] == pytest.approx(0.44, abs=0.01)
    assert shares["megatron_sc21_table1-0008"] == pytest.approx(0.50, abs=0.01)


def test_a_source_is_never_guessed_from_itself() -> None:
    alone = [point for point in known() if point.case.source == "simumax_b200"]
    others = [point for point in known() if point.case.source == "fms_fsdp"]
    slower = [Point(p.case, p.device, p.peak_s, 100 * p.measured_s) for p in alone]
    before, after = guess([*alone, *others], "plain"), guess([*slower, *others], "plain")
    assert all(before[point.case.id] == after[point.case.id] for point in alone)
    assert all(before[point.case.id] < after[point.case.id] for point in others)


def test_the_guess_from_itself_is_right_for_most_of_similar_models() -> None:
    own = [point for point in known() if point.case.source == "megatron_sc21_table1"]
    assert errors(own, guess(own, "own")).median < 0.05


def test_errors_count_rows() -> None:
    two = known()[:2]
    exact = {point.case.id: point.measured_s for point in two}
    assert errors(two, exact).p90 == 0
    assert errors(two, {name: 1.1 * seconds for name, seconds in exact.items()}).median == pytest.approx(0.1)


def test_families_hold_different_plans_of_one_run() -> None:
    grouped = families(decoders())
    assert len(grouped) > 100
    for members in grouped.values():
        assert len({case.global_batch for case in members}) == 1
        assert len({case.cluster for case in members}) == 1
        assert any(case.plan != members[0].plan for case in members)
    assert max(len(members) for members in grouped.values()) == 29  # vTrain's 39.1B on 512 GPUs

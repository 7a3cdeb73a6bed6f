"""The guess to beat, and the families that a predictor must rank."""

from functools import cache

import pytest

from validation.runs.baseline import TimedCase, guess_errors, guess_step_s, timed_cases
from validation.runs.case import PublishedCase
from validation.runs.cover import cover
from validation.runs.families import families
from validation.runs.reading.flops import DECODER


@cache
def decoders() -> tuple[PublishedCase, ...]:
    return tuple(case for case in cover().cases if case.model.call == DECODER)


@cache
def timed_decoders() -> tuple[TimedCase, ...]:
    return timed_cases(decoders())


@pytest.mark.soak
def test_the_share_of_the_peak_is_that_of_the_publication() -> None:
    """44% and 50% of 312 TFLOP/s, by the paper's own count."""
    shares = {timed.case.id: timed.share for timed in timed_decoders()}
    assert shares["megatron_sc21_table1-0002"] == pytest.approx(0.44, abs=0.01)
    assert shares["megatron_sc21_table1-0008"] == pytest.approx(0.50, abs=0.01)


def test_a_source_is_never_guessed_from_itself() -> None:
    of_source = [timed for timed in timed_decoders() if timed.case.source == "simumax_b200"]
    others = [timed for timed in timed_decoders() if timed.case.source == "fms_fsdp"]
    slower = [TimedCase(t.case, t.device, t.peak_s, 100 * t.measured_s) for t in of_source]
    before = guess_step_s([*of_source, *others], "same_gpu")
    after = guess_step_s([*slower, *others], "same_gpu")
    assert all(before[timed.case.id] == after[timed.case.id] for timed in of_source)
    assert all(before[timed.case.id] < after[timed.case.id] for timed in others)


def test_the_guess_from_itself_is_right_for_most_of_similar_models() -> None:
    of_source = [timed for timed in timed_decoders() if timed.case.source == "megatron_sc21_table1"]
    assert guess_errors(of_source, guess_step_s(of_source, "same_source")).median < 0.05


def test_errors_count_rows() -> None:
    two = timed_decoders()[:2]
    exact = {timed.case.id: timed.measured_s for timed in two}
    assert guess_errors(two, exact).p90 == 0
    assert guess_errors(two, {name: 1.1 * seconds for name, seconds in exact.items()}).median == pytest.approx(0.1)


def test_families_hold_different_plans_of_one_run() -> None:
    grouped = families(decoders())
    assert grouped
    for members in grouped.values():
        assert len({case.global_batch for case in members}) == 1
        assert len({case.cluster for case in members}) == 1
        assert any(case.plan != members[0].plan for case in members)
    sources = {members[0].source for members in grouped.values()}
    assert {"vtrain_single", "vtrain_multi", "bigscience_a100"} <= sources, "these compare plans for the same run"

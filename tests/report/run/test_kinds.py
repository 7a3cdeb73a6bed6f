"""Where the time of a run went, from what its ranks recorded."""

import pytest

from meshwright.report.run.kinds import (
    COMPUTING,
    EXCHANGING,
    FOR_DATA,
    FOR_OTHERS,
    OTHER,
    kinds_by_rank,
    kinds_of_windows,
    predicted_kinds,
    rank_speeds,
)
from meshwright.report.run.record import RankTimes, Window


def rank(*computing_s: float, step_s: float = 1.0) -> RankTimes:
    """A rank that computes for these seconds in the steps of each window of ten, and is blocked for the rest."""
    windows = [
        Window(
            10 * number,
            10,
            float(number),
            {
                "forward": 4 * seconds,
                "backward": 6 * seconds,
                "exchange": 10 * (step_s - seconds),
                "data": 1.0,
                "log": 0.5,
            },
            2**30,
        )
        for number, seconds in enumerate(computing_s, start=1)
    ]
    return RankTimes(tuple(windows), ())


def test_the_rank_that_is_blocked_least_says_what_the_exchange_takes() -> None:
    windows = kinds_of_windows({0: rank(0.6, 0.6), 1: rank(0.9, 0.9)})
    fast, slow = kinds_by_rank(windows).values()
    expected = {COMPUTING: 0.6, EXCHANGING: 0.1, FOR_OTHERS: 0.3, FOR_DATA: 0.1, OTHER: 0.05}
    assert fast == pytest.approx(expected)
    assert slow == pytest.approx({**expected, COMPUTING: 0.9, FOR_OTHERS: 0.0})


def test_a_rank_that_computes_longer_is_the_one_that_others_wait_for() -> None:
    speeds = rank_speeds(kinds_of_windows({0: rank(0.6, 0.6), 1: rank(0.6, 0.6), 2: rank(0.9, 0.9)}))
    assert [speed.relative for speed in speeds] == pytest.approx([1.0, 1.0, 1.5])
    assert [speed.last_share for speed in speeds] == [0.0, 0.0, 1.0]


def test_a_single_rank_has_no_stragglers() -> None:
    assert rank_speeds(kinds_of_windows({0: rank(0.5)})) == []


def test_steps_that_were_repeated_after_a_restart_are_compared_with_their_repetitions() -> None:
    repeated = RankTimes((*rank(0.6).windows, *rank(0.8).windows), ())
    windows = kinds_of_windows({0: repeated, 1: repeated})
    assert [window[0].seconds[COMPUTING] for window in windows] == pytest.approx([0.6, 0.8])
    assert all(len(window) == 2 for window in windows)


def test_the_terms_of_a_prediction_are_the_same_kinds() -> None:
    kinds = predicted_kinds({"compute": 1.0, "launch": 0.5, "replicate": 0.25, "bubble": 0.125, "input": 0.0625})
    assert kinds == {COMPUTING: 1.5, EXCHANGING: 0.25, FOR_OTHERS: 0.125, FOR_DATA: 0.0625, OTHER: 0.0}

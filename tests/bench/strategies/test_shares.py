"""The time of ranks is divided among computing, communicating, waiting and the bubble."""

import pytest

from meshwright.bench.strategies.gpu_shares import shares_of_spans
from meshwright.bench.strategies.time_shares import time_shares

COMPUTES, EXCHANGES = False, True


def _rank(*states: bool) -> list[tuple[float, bool]]:
    return [(0.001 * number, state) for number, state in enumerate(states)]


RANKS = [
    _rank(COMPUTES, COMPUTES, EXCHANGES, EXCHANGES),  # it waits in the third moment
    _rank(COMPUTES, COMPUTES, COMPUTES, EXCHANGES),
]


def test_a_rank_waits_while_another_one_computes() -> None:
    shares = {"computing": 5 / 8, "communicating": 2 / 8, "waiting": 1 / 8, "bubble": 0.0}
    assert time_shares(RANKS, is_pipeline=False) == shares


def test_in_a_pipeline_waiting_is_the_bubble() -> None:
    shares = time_shares(RANKS, is_pipeline=True)
    assert shares is not None
    assert (shares["bubble"], shares["waiting"]) == (1 / 8, 0.0)


def test_asynchronous_ranks_do_not_wait_for_each_other() -> None:
    shares = time_shares(RANKS, is_pipeline=False, is_asynchronous=True)
    assert shares is not None
    assert (shares["waiting"], shares["communicating"]) == (0.0, 3 / 8)


def test_without_samples_there_are_no_shares() -> None:
    assert time_shares([_rank(COMPUTES), []], is_pipeline=False) is None


def test_kernels_of_nccl_count_where_nothing_computes() -> None:
    shares = shares_of_spans([(0.0, 4.0)], [(0.0, 6.0), (8.0, 10.0)], is_pipeline=False)
    assert shares == pytest.approx({"computing": 0.4, "communicating": 0.4, "waiting": 0.2, "bubble": 0.0})

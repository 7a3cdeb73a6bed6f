"""Stages are cut so that the slowest is as fast as it can be, and only where the model can be cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cuts import balanced


def stage_costs(costs: list[float], ends: tuple[int, ...]) -> list[float]:
    edges = [0, *(end + 1 for end in ends), len(costs)]
    return [sum(costs[a:b]) for a, b in pairwise(edges)]


def slowest(costs: list[float], cuttable: list[bool], stages: int) -> float:
    places = [place for place in range(len(costs) - 1) if cuttable[place]]
    return min(max(stage_costs(costs, ends)) for ends in combinations(places, stages - 1))


def test_equal_blocks_are_divided_equally() -> None:
    assert balanced([1.0] * 12, [True] * 12, 4) == (2, 5, 8)


def test_a_heavy_head_takes_blocks_from_its_stage() -> None:
    ends = balanced([0.1, *[1.0] * 11, 2.0], [True] * 13, 4)
    assert ends is not None
    assert stage_costs([0.1, *[1.0] * 11, 2.0], ends)[-1] <= 4.0


def test_too_few_places_to_cut() -> None:
    assert balanced([1.0, 1.0, 1.0], [True, False, False], 3) is None


@given(
    st.lists(st.tuples(st.floats(0.01, 10), st.booleans()), min_size=2, max_size=9),
    st.integers(2, 4),
)
def test_no_other_cuts_are_better(pieces: list[tuple[float, bool]], stages: int) -> None:
    costs, cuttable = [cost for cost, _ in pieces], [can for _, can in pieces]
    ends = balanced(costs, cuttable, stages)
    if sum(cuttable[:-1]) < stages - 1:
        assert ends is None
        return
    assert ends is not None
    assert len(ends) == stages - 1
    assert all(cuttable[end] for end in ends)
    assert max(stage_costs(costs, ends)) == pytest.approx(slowest(costs, cuttable, stages), rel=1e-6)

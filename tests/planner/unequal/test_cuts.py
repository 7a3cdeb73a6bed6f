"""Cuts of a pipeline over devices of different speed, against all cuts of small models."""

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.cuts import balanced
from meshwright.planner.unequal.cuts import balanced_by_speed

COSTS = st.lists(st.tuples(st.floats(0.1, 9), st.floats(0.1, 9), st.booleans()), min_size=1, max_size=7)


def slowest(cuts: tuple[int, ...], costs: list[list[float]], stages: list[int]) -> float:
    edges = [0, *(cut + 1 for cut in cuts), len(costs[0])]
    return max(sum(costs[kind][begin:end]) for kind, (begin, end) in zip(stages, pairwise(edges), strict=True))


@given(COSTS, st.lists(st.integers(0, 1), min_size=1, max_size=4))
def test_no_other_cuts_are_faster(pieces: list[tuple[float, float, bool]], stages: list[int]) -> None:
    costs = [[piece[kind] for piece in pieces] for kind in (0, 1)]
    places = [index for index, (*_, cuttable) in enumerate(pieces[:-1]) if cuttable]
    cuts = balanced_by_speed(costs, [cuttable for *_, cuttable in pieces], stages)
    options = [slowest(chosen, costs, stages) for chosen in combinations(places, len(stages) - 1)]
    if cuts is None:
        assert not options
        return
    assert set(cuts) <= set(places)
    assert slowest(cuts, costs, stages) <= min(options) * (1 + 1e-3)


def test_equal_devices_get_the_cuts_of_equal_devices() -> None:
    costs = [3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0]
    assert balanced_by_speed([costs, costs], [True] * 8, [0, 1, 0]) == balanced(costs, [True] * 8, 3)


def test_the_cut_moves_towards_the_faster_device() -> None:
    fast, slow = [1.0] * 12, [3.0] * 12
    assert balanced_by_speed([fast, slow], [True] * 12, [0, 1]) == (8,)  # nine pieces and three
    assert balanced_by_speed([fast, slow], [True] * 12, [1, 0]) == (2,)

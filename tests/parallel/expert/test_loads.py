"""Loads of experts and ranks are multiples of the even share, and a skewed router is named."""

import pytest

from meshwright.parallel.expert.loads import rank_loads, relative_loads, report_loads, skew_warning


def test_even_routing_gives_every_expert_and_rank_its_share() -> None:
    assert relative_loads([5, 5, 5, 5]) == [1.0] * 4
    assert rank_loads([8, 2, 5, 5], 2) == [1.0, 1.0]
    assert skew_warning({"mlp": [6, 4, 5, 5]}, 2) is None
    assert relative_loads([0, 0]) == [0.0, 0.0]


def test_a_skewed_router_is_told_with_the_expert_and_the_busiest_rank() -> None:
    counts = {"layers.0.mlp": [5, 5, 5, 5], "layers.1.mlp": [1, 17, 1, 1]}
    with pytest.warns(
        UserWarning, match=r"router of layers\.1\.mlp is skewed: expert 1 of 4 gets 3\.4 times .* 2 ranks computes 1\.8"
    ):
        line = report_loads(counts, 2)
    assert "experts of 2 layers: the most used one gets 3.40 times its even share" in line

"""Loads of experts and ranks are multiples of the even share, and a skewed router is named."""

from typing import cast

import pytest
import torch
import torch.distributed as dist

from meshwright.parallel.differentiable_collectives import AxisGroup
from meshwright.parallel.expert.loads import (
    ExpertLoads,
    Skew,
    largest_skew,
    rank_loads,
    relative_loads,
    report_loads,
    skew_warning,
)


def test_even_routing_gives_every_expert_and_rank_its_share() -> None:
    assert relative_loads([5, 5, 5, 5]) == [1.0] * 4
    assert rank_loads([8, 2, 5, 5], 2) == [1.0, 1.0]
    assert skew_warning({"mlp": [6, 4, 5, 5]}, 2) is None
    assert relative_loads([0, 0]) == [0.0, 0.0]


def test_a_skewed_router_is_told_with_the_expert_and_the_busiest_rank() -> None:
    counts = {"layers.0.mlp": [5, 5, 5, 5], "layers.1.mlp": [1, 17, 1, 1]}
    with pytest.warns(
        UserWarning,
        match=r"router of layers\.1\.mlp is skewed: expert 1 of 4 gets 3\.4 times .* rank 0 of the 2 ranks .* 1\.8",
    ):
        line = report_loads(counts, 2)
    assert "experts of 2 layers: the most used one gets 3.40 times its even share" in line


def test_the_largest_skew_names_layer_expert_and_rank() -> None:
    assert largest_skew({"a": [1, 1, 17, 1], "b": [1, 1, 1, 19]}, 2) == Skew("b", 3, 19 * 4 / 22, 1, 20 * 2 / 22, 2)
    assert largest_skew({"a": [5, 5, 5, 5]}, 2) is None


def test_loads_since_the_last_log_are_those_of_the_steps_between() -> None:
    nobody = cast(dist.ProcessGroup, None)
    loads = ExpertLoads(AxisGroup(nobody, 0, 2, "expert"), nobody, torch.device("cpu"))
    assert loads.since_log({"a": [4, 0]}) == {"a": [4, 0]}
    assert loads.since_log({"a": [5, 6]}) == {"a": [1, 6]}
    loads.reset()
    assert loads.since_log({"a": [2, 2]}) == {"a": [2, 2]}

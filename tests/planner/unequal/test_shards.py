"""Shards by memory: plans that do not fit into the smallest device with equal shards, and fit with others."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.constraints import make_constraints
from meshwright.planner.constraints.apply import constrained
from meshwright.planner.explanation.explain import explain
from meshwright.planner.explanation.report import report_search
from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.search import search
from meshwright.planner.unequal.shards import _largest_part, _parts, _proportions, with_shards_by_memory
from meshwright.profile.optimizer import OptimizerCost
from meshwright.simulator.predict import predict_plan
from tests.planner.cases import ADAMW, small_decoder

BATCH = 16
EVEN = Plan.model_validate({"axes": {"shard": 2}, "numerics": {"precision": "bf16"}})
SIMPLE = {
    "axes.shard": 2,
    "memory.accumulation": 1,
    "memory.recompute": "none",
    "compute.compile": "none",
    "compute.loss_chunks": 1,
    "shares.samples": [],
}


@given(st.lists(st.floats(0.01, 1.0), min_size=2, max_size=16))
def test_parts_are_as_equal_as_their_limits_allow(limits: list[float]) -> None:
    parts = _parts(limits)
    if parts is None:
        assert sum(limits) < 1
        return
    assert sum(parts) == pytest.approx(1)
    assert all(part <= limit + 1e-12 for part, limit in zip(parts, limits, strict=True))
    assert all(part in (limit, max(parts)) for part, limit in zip(parts, limits, strict=True))
    shards = _proportions(parts, limits)
    assert min(shards) >= 1
    if max(shards) < 48:  # otherwise the prediction decides whether they fit
        assert all(shard / sum(shards) <= limit + 1e-12 for shard, limit in zip(shards, limits, strict=True))
        assert max(shards) / sum(shards) <= 1.02 * max(parts) + 1e-12


def test_small_numbers_are_preferred() -> None:
    assert _proportions([0.34, 0.34, 0.16, 0.16], [1.0, 1.0, 0.17, 0.17]) == (2, 2, 1, 1)


@given(st.lists(st.tuples(st.floats(-1.0, 1.0), st.floats(0.0, 4.0)), min_size=1, max_size=4))
def test_the_largest_part_fits_by_lines_through_a_convex_function(lines: list[tuple[float, float]]) -> None:
    """Memory above the capacity is the largest of `start + slope · part`."""

    def room(part: float) -> list[float]:
        return [-max(start + slope * part for start, slope in lines)]

    part = _largest_part(room)
    assert part == 0.0 or room(part)[0] >= -1e-9
    assert part == 1.0 or room(1.0)[0] < 0


@cache
def machines() -> Cluster:
    """Two machines that are equally fast, one of which has less memory than even shards need."""
    cluster = find_cluster("A100-80GB+A100-40GB")
    large, small = cluster.nodes
    even = predict_plan(cluster, small_decoder().get("bf16", "none"), EVEN, BATCH, ADAMW)
    device = small.device.model_copy(update={"memory_bytes": even.memory.device_bytes})  # of which a margin stays free
    return cluster.model_copy(update={"nodes": (large, small.model_copy(update={"device": device}))})


@pytest.mark.soak
def test_a_plan_fits_with_the_shards_that_are_found() -> None:
    inputs = PlanningInputs(machines(), BATCH, ADAMW)
    profile = small_decoder().get("bf16", "none")
    plan = with_shards_by_memory(EVEN, inputs, profile)
    assert plan is not None
    large, small = plan.shares.shards
    assert large > small
    predicted = predict_plan(inputs.cluster, profile, plan, BATCH, ADAMW)
    assert inputs.fits(predicted)
    assert not inputs.fits(predict_plan(inputs.cluster, profile, EVEN, BATCH, ADAMW))
    (first,), (second,) = (group.memory for group in predicted.groups)
    state = [memory.breakdown["weights"] + memory.breakdown["optimizer state"] for memory in (first, second)]
    assert state[0] / state[1] == pytest.approx(large / small, rel=1e-6)
    rows = OptimizerCost(state_ratio=2.0, temporary_ratio=1.0, multi_tensor=True, elementwise=False)
    assert with_shards_by_memory(EVEN, PlanningInputs(machines(), BATCH, rows), profile) is None


@pytest.mark.soak
def test_a_search_divides_shards_by_memory_only_where_even_ones_do_not_fit() -> None:
    profiles = small_decoder()
    inputs = constrained(PlanningInputs(machines(), BATCH, ADAMW), make_constraints(SIMPLE))
    result = search(inputs, profiles)
    best, words = result.ranked[0], " ".join(explain(result, inputs))
    assert len(set(best.plan.shares.shards)) == 2
    assert best.even is not None
    assert not inputs.fits(best.even[1])
    assert "A100-80GB ranks hold" in words
    assert "because equal shards would not fit into the memory of the A100-40GB." in words
    entry = report_search(result, inputs, profiles).to_dict()["best"]
    assert [group["shard_part"] for group in entry["data_ranks"]] == [best.plan.shard_part(0), best.plan.shard_part(1)]

    roomy = constrained(PlanningInputs(find_cluster("A100-80GB+A100-40GB"), BATCH, ADAMW), make_constraints(SIMPLE))
    assert not search(roomy, profiles).ranked[0].plan.shares.shards

    for avoided in ("shares", "shards"):
        even = constrained(PlanningInputs(machines(), BATCH, ADAMW), make_constraints(SIMPLE, avoid=(avoided,)))
        with pytest.raises(NoPlanFits, match="A100-40GB"):
            search(even, profiles)

    fixed = constrained(PlanningInputs(machines(), BATCH, ADAMW), make_constraints({**SIMPLE, "shares.shards": [9, 1]}))
    result = search(fixed, profiles)
    assert {priced.plan.shares.shards for priced in result.ranked} == {(9, 1)}
    assert "as the constraints say" in " ".join(explain(result, fixed))


def test_contradictions_about_shards_are_named() -> None:
    with pytest.raises(InputError, match=r"shares.shards is fixed to \[2, 1\], but 'shares' is avoided"):
        make_constraints({"shares.shards": [2, 1]}, avoid=("shares",))
    inputs = PlanningInputs(find_cluster("A100-80GB+A100-40GB"), BATCH, ADAMW)
    with pytest.raises(InputError, match=r"shares.shards is \[2, 1, 1\], 3 numbers, but axes.shard is 2"):
        search(constrained(inputs, make_constraints({"axes.shard": 2, "shares.shards": [2, 1, 1]})), small_decoder())

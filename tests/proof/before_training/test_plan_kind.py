"""Tests which plans are checked, and which others are taken instead of an unequal one."""

from typing import Any

import pytest

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.before_training.plan_kind import (
    UnequalDivisions,
    needs_check,
    refuse_divided,
    samples_of_check,
    small_plan,
)


def plan(**groups: Any) -> Plan:
    return Plan.model_validate(groups)


DIVIDED = [
    plan(axes={"tensor": 2}),
    plan(axes={"context": 2}),
    plan(axes={"pipeline": 2}, pipeline={"cuts": ["a"]}),
    plan(axes={"replicate": 2, "expert": 2}),
    plan(axes={"tensor": 2}, modules={"branches": {"a": 1}}),
    plan(axes={"replicate": 2}, modules={"splits": {"a": {"kind": "column", "axis": "replicate"}}}),
    plan(axes={"replicate": 2}, shares=[3, 1]),
    plan(axes={"shard": 2}, shares={"shards": [2, 1]}),
]
UNDIVIDED = [plan(), plan(axes={"replicate": 8}), plan(axes={"replicate": 2, "shard": 2}, memory={"accumulation": 4})]


def test_plans_that_divide_are_checked() -> None:
    assert all(map(needs_check, DIVIDED))
    assert not any(map(needs_check, UNDIVIDED))
    for undivided in UNDIVIDED:
        refuse_divided(undivided)


def test_a_small_plan_divides_alike_and_is_not_compiled() -> None:
    groups = {"axes": {"pipeline": 2, "tensor": 2}, "pipeline": {"cuts": ["a"], "microbatches": 64}}
    small = small_plan(plan(**groups, compute={"compile": "blocks", "loss_chunks": 4}, memory={"accumulation": 16}))
    assert (small.axes, small.pipeline.cuts) == (plan(**groups).axes, ("a",))
    assert (small.pipeline.microbatches, small.memory.accumulation) == (4, 2)
    assert (small.compute.compile, small.compute.loss_chunks) == ("none", 4)


@pytest.mark.parametrize(
    ("groups", "samples"),
    [
        ({"axes": {"tensor": 2}}, 2),
        ({"axes": {"replicate": 2, "tensor": 2}, "memory": {"accumulation": 2}}, 8),
        ({"axes": {"replicate": 2}, "shares": [86, 42]}, 32),
        ({"axes": {"replicate": 2}, "shares": [6, 2]}, 8),
    ],
)
def test_unequal_shares_have_enough_samples(groups: dict[str, Any], samples: int) -> None:
    assert samples_of_check(plan(**groups)) == samples


def test_other_divisions_are_left_after_an_unequal_one() -> None:
    unequal = UnequalDivisions()
    unequal.add(plan(axes={"tensor": 2}))
    with pytest.raises(InputError, match="tensor 4"):
        unequal(plan(axes={"tensor": 4, "replicate": 2}, modules={"sequence": True}))
    for other in (*UNDIVIDED, plan(axes={"context": 2})):
        unequal(other)
    unequal.add(plan(axes={"context": 2}))
    unequal.add(plan(axes={"replicate": 2}, shares=[3, 1]))
    with pytest.raises(InputError, match="pipeline 2"):  # after three, none that divides is proposed
        unequal(DIVIDED[2])
    for other in UNDIVIDED:
        unequal(other)

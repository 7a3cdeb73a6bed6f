"""A plan for more ranks than there are keeps its axes with fewer ranks each."""

from typing import Any

import pytest

from meshwright.plan import Plan
from meshwright.proof.shrink import shrink


def axes(**sizes: int) -> dict[str, int]:
    return {"replicate": 1, "shard": 1, "context": 1, "tensor": 1, "pipeline": 1, "expert": 1, **sizes}


@pytest.mark.parametrize(
    ("sizes", "ranks", "expected"),
    [
        ({"replicate": 64}, 8, {"replicate": 8}),
        ({"replicate": 4, "tensor": 8, "pipeline": 2}, 8, {"replicate": 2, "tensor": 2, "pipeline": 2}),
        ({"replicate": 16, "shard": 8}, 8, {"replicate": 2, "shard": 4}),
        ({"replicate": 2, "tensor": 2, "pipeline": 2}, 4, {"tensor": 2, "pipeline": 2}),
        ({"replicate": 3}, 2, {"replicate": 2}),
        ({"tensor": 3}, 2, {}),
        ({"shard": 8, "context": 8, "expert": 8}, 8, {"shard": 2, "context": 4, "expert": 2}),
        ({"tensor": 6}, 4, {"tensor": 3}),
        ({"replicate": 2, "shard": 2}, 1, {}),
        ({"replicate": 7, "shard": 5}, 9, {"replicate": 2, "shard": 2}),
    ],
)
def test_axes_are_divided_and_none_is_removed_while_another_can_be_divided(
    sizes: dict[str, int], ranks: int, expected: dict[str, int]
) -> None:
    smaller, message = shrink(Plan.model_validate({"axes": sizes}), ranks)
    assert smaller.axes.model_dump() == axes(**expected)
    assert smaller.world_size <= ranks
    assert message is not None
    assert f"{ranks} ranks are available" in message


def test_the_message_names_both_plans() -> None:
    _, message = shrink(Plan.model_validate({"axes": {"replicate": 16, "tensor": 4}}), 8)
    assert message == "replicate 16 × tensor 4 to replicate 2 × tensor 4: 8 ranks are available, the plan has 64"


def test_a_plan_that_fits_is_left_alone() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 4, "tensor": 2}})
    assert shrink(plan, 8) == (plan, None)


@pytest.mark.parametrize(
    ("pipeline", "ranks", "cuts"),
    [
        ({"schedule": "1f1b", "cuts": ["a", "b", "c"]}, 2, ("b",)),
        ({"schedule": "interleaved_1f1b", "cuts": list("abcdefg")}, 2, ("b", "d", "f")),
        ({"schedule": "1f1b", "cuts": ["a", "b", "c"], "microbatches": 4}, 1, ()),
    ],
)
def test_a_shorter_pipeline_keeps_the_stages_of_a_rank(
    pipeline: dict[str, Any], ranks: int, cuts: tuple[str, ...]
) -> None:
    smaller, _ = shrink(Plan.model_validate({"axes": {"pipeline": 4}, "pipeline": pipeline}), ranks)
    assert smaller.pipeline.cuts == cuts
    assert smaller.pipeline.microbatches == (1 if ranks == 1 else pipeline.get("microbatches", 1))


def test_branches_move_to_ranks_that_exist() -> None:
    modules = {
        "splits": {"head": {"kind": "column", "axis": "replicate"}, "body": {"kind": "row"}},
        "branches": {"left": 0, "right": 3},
    }
    plan = Plan.model_validate({"axes": {"replicate": 2, "tensor": 4}, "modules": modules})
    smaller, _ = shrink(plan, 2)
    assert smaller.axes.model_dump() == axes(tensor=2)
    assert list(smaller.modules.splits) == ["body"]
    assert smaller.modules.branches == {"left": 0, "right": 1}
    assert shrink(plan, 1)[0].modules.branches == {}

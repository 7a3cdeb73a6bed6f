import pytest

from meshwright.compat.accelerate.plan_argument import check_plan
from meshwright.compat.lightning.plan_argument import check_loop_plan
from meshwright.compat.plan_argument import read_plan
from meshwright.errors import InputError
from meshwright.plan import Plan


def test_shards_in_proportion_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"Trainer: the plan \(shard 2 .*\) has shares.shards, which this loop does not"
    ):
        read_plan({"axes": {"shard": 2}, "shares": {"shards": [2, 1]}}, 2, "Trainer")


def test_a_search_for_plans_of_other_loops_leaves_shards_even() -> None:
    plan = Plan.model_validate({"axes": {"shard": 2}, "shares": {"shards": [2, 1]}})
    with pytest.raises(InputError, match="loops of Accelerate cannot run the plan"):
        check_plan(plan)
    with pytest.raises(InputError, match=r"Lightning: the plan .* has shares.shards"):
        check_loop_plan(plan)


def test_loops_that_make_their_own_steps_take_fixed_shares_only() -> None:
    plan = {"axes": {"replicate": 2}, "shares": [2, 1]}
    assert read_plan(plan, 2, "Accelerator").shares.samples == (2, 1)
    with pytest.raises(InputError, match=r"Accelerator: the plan \(replicate 2 .*\) has adaptive shares, which need"):
        read_plan({**plan, "shares": "adaptive"}, 2, "Accelerator")

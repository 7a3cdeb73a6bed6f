import pytest

from meshwright.compat.plan_argument import read_plan
from meshwright.errors import InputError


@pytest.mark.parametrize("shares", ["adaptive", [2, 1]])
def test_loops_that_give_every_rank_its_batch_size_refuse_shares(shares: object) -> None:
    with pytest.raises(InputError, match=r"Accelerator: the plan \(replicate 2 .*\) has shares, but this loop gives"):
        read_plan({"axes": {"replicate": 2}, "shares": shares}, 2, "Accelerator")


def test_shards_in_proportion_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"Trainer: the plan \(shard 2 .*\) has shares.shards, which this loop does not"
    ):
        read_plan({"axes": {"shard": 2}, "shares": {"shards": [2, 1]}}, 2, "Trainer")

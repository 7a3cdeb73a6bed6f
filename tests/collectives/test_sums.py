"""Small sums beside other work: the same through the backend and in shared memory, and the dead are named."""

import pytest
import torch
import torch.distributed as dist

from meshwright.collectives.sums import NativeSums, SharedSums, make_sums
from meshwright.errors import CollectiveError
from tests.ranks import run_ranks


def _summed(rank: int, world_size: int) -> list[object]:
    group = dist.group.WORLD
    assert group is not None
    found: list[object] = []
    for algorithm in ("auto", "native"):
        sums = make_sums(algorithm, group, torch.device("cpu"))
        first = sums.start(torch.tensor([rank + 1.0, 0.1], dtype=torch.float64))
        second = sums.start(torch.tensor([10 * rank, 1]))
        found += [type(sums).__name__, first().tolist(), second().tolist(), first().tolist()]
        sums.close()
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_all_ranks_either_way(ranks: int) -> None:
    for told in run_ranks(_summed, ranks):
        shared, native = told[:4], told[4:]
        assert [shared[0], native[0]] == [SharedSums.__name__, NativeSums.__name__]
        assert shared[1] == pytest.approx([ranks * (ranks + 1) / 2, 0.1 * ranks])
        assert shared[2] == [10 * sum(range(ranks)), ranks]
        assert shared[1:] == native[1:]


def _left_alone(rank: int, world_size: int) -> str:
    group = dist.group.WORLD
    assert group is not None
    sums = SharedSums(group)
    sums.start(torch.ones(1, dtype=torch.float64))()
    if rank == 1:
        sums.close()
        return ""
    with pytest.raises(CollectiveError) as caught:
        sums.start(torch.ones(1, dtype=torch.float64))()
    return str(caught.value)


def test_a_rank_that_has_left_is_named_with_the_sum() -> None:
    told = run_ranks(_left_alone, 2)[0]
    assert told == "shared-memory all-reduce of sum 1: rank 1 has left"

"""Small sums are the same through the backend and in shared memory, and a missing rank is named."""

import pytest
import torch

from meshwright.collectives.small_sums import NativeSmallSums, SharedMemorySums, make_small_sums
from meshwright.errors import CollectiveError
from tests.collectives.world_group import world_group
from tests.ranks import run_ranks


def _sum_with_both_algorithms(rank: int, world_size: int) -> list[object]:
    results: list[object] = []
    for algorithm in ("auto", "native"):
        sums = make_small_sums(algorithm, world_group(), torch.device("cpu"))
        first = sums.start(torch.tensor([rank + 1.0, 0.1], dtype=torch.float64))
        second = sums.start(torch.tensor([10 * rank, 1]))
        results += [type(sums).__name__, first().tolist(), second().tolist(), first().tolist()]
        sums.close()
    return results


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_of_all_ranks_through_the_backend_and_in_shared_memory(ranks: int) -> None:
    for results in run_ranks(_sum_with_both_algorithms, ranks):
        shared, native = results[:4], results[4:]
        assert [shared[0], native[0]] == [SharedMemorySums.__name__, NativeSmallSums.__name__]
        assert shared[1] == pytest.approx([ranks * (ranks + 1) / 2, 0.1 * ranks])
        assert shared[2] == [10 * sum(range(ranks)), ranks]
        assert shared[1:] == native[1:]


def _wait_for_a_rank_that_closed(rank: int, world_size: int) -> str:
    sums = SharedMemorySums(world_group())
    sums.start(torch.ones(1, dtype=torch.float64))()
    if rank == 1:
        sums.close()
        return ""
    with pytest.raises(CollectiveError) as caught:
        sums.start(torch.ones(1, dtype=torch.float64))()
    return str(caught.value)


def test_a_rank_that_has_left_is_named_with_the_sum() -> None:
    message = run_ranks(_wait_for_a_rank_that_closed, 2)[0]
    assert message == "shared-memory all-reduce of sum 1: rank 1 has left"

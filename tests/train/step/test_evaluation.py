"""Which batches ranks evaluate when there are not enough for all of them, and how their totals are combined."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from meshwright.data.loading import LoadingOptions, SampleShare
from meshwright.train.metrics import MetricTotals
from meshwright.train.step.evaluation import EvaluationBatches, combine_totals
from tests.ranks import RankPool


class Stream(IterableDataset[int]):
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.size))


class UsersBatch:
    """A batch of the user's own class, which cannot be sent to another process."""

    def __init__(self, samples: list[int]) -> None:
        self.samples = samples
        self.first = lambda: samples[0]


def evaluated(rank: int, world_size: int, dataset: Any, same_count: bool, stops: int | None) -> tuple[list[Any], bool]:
    """Returns (samples that count, all samples) of each batch that this rank evaluates, and whether it gave up. Rank
    `stops` is interrupted after its first batch."""
    count = 0

    def interrupted() -> bool:
        nonlocal count
        count += 1
        return rank == stops and count > 1

    share, loading = SampleShare(rank, world_size), LoadingOptions(workers=0, collate=UsersBatch)
    batches = EvaluationBatches(dataset, 2, share, loading, interrupted, same_count)
    return [(batch.samples, batch.data.samples) for batch in batches], batches.gave_up


@pytest.mark.parametrize("kind", ["mapped", "stream"])
def test_a_rank_without_a_batch_takes_that_of_rank_0_with_weight_0(two: RankPool, kind: str) -> None:
    for size, first, second in (
        (1, [(1, [0])], [(0, [0])]),
        (5, [(2, [0, 1]), (1, [4])], [(2, [2, 3]), (0, [2, 3])]),
    ):
        dataset = range(size) if kind == "mapped" else Stream(size)
        assert two.run(evaluated, dataset, True, None) == [(first, False), (second, False)]
        second_alone = [batch for batch in second if batch[0]]
        assert two.run(evaluated, dataset, False, None) == [(first, False), (second_alone, False)]


def test_an_interruption_of_one_rank_stops_all(two: RankPool) -> None:
    assert two.run(evaluated, range(8), True, 1) == [([(2, [0, 1])], True), ([(2, [2, 3])], True)]


def combined(rank: int, world_size: int, gives_up: int | None) -> dict[str, float] | None:
    totals = MetricTotals({}, torch.device("cpu"))
    if rank < 2:  # the last rank has evaluated nothing
        totals.add_value("loss", (0.5 * (1 + rank), 1), 1)
        totals.add_value("accuracy", rank, 3)
    return combine_totals(totals, rank == gives_up, world_size)


def test_totals_of_all_ranks_are_added_up(three: RankPool) -> None:
    expected = {"loss": 0.75, "accuracy": 0.5}
    assert three.run(combined, None) == [expected] * 3
    assert three.run(combined, 2) == [None] * 3

"""Samples that are drawn by weight: how often, in which order, and with which random numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from meshwright.data.loading import Batch, LoadingOptions, SampleShare, train_batches
from meshwright.data.sampling import WeightedSampling, repeat_numbers
from meshwright.errors import InputError


class Drawn(Dataset[Any]):
    """Samples are their index and a random number."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return index, torch.rand(())


WEIGHTS = np.array([0.0, 1, 1, 2, 6, 0])


def batches(rank: int, ranks: int, start: tuple[int, int] = (0, 0), **options: Any) -> list[Batch]:
    loading = LoadingOptions(sampling=WeightedSampling(WEIGHTS, 11), **options)
    share = SampleShare(rank, ranks)
    found = train_batches(Drawn(), seed=5, global_batch=4, share=share, loading=loading, start=start, epochs=2)
    return list(found)


def rows(ranks: int, start: tuple[int, int] = (0, 0), **options: Any) -> list[list[tuple[int, float]]]:
    """The samples of each global batch, as the ranks get them one after another."""
    of_ranks = [batches(rank, ranks, start, **options) for rank in range(ranks)]
    return [
        [
            (int(index), float(number))
            for batch in of_batch
            for part in batch.microbatches
            for index, number in list(zip(*part.data, strict=True))[: part.samples]
        ]
        for of_batch in zip(*of_ranks, strict=True)
    ]


def test_draws_never_change() -> None:
    """A run saved by an older version, or on another machine, goes on with the same samples."""
    assert WeightedSampling(WEIGHTS, 12).order(0, 0).tolist() == [3, 3, 4, 4, 3, 4, 3, 2, 1, 3, 4, 3]
    assert WeightedSampling(WEIGHTS, 4, replacement=False).order(0, 0).tolist() == [4, 2, 1, 3]


def test_samples_are_drawn_in_proportion_to_their_weights() -> None:
    counts = np.bincount(WeightedSampling(WEIGHTS, 100_000).order(1, 0), minlength=6)
    assert counts[0] == counts[5] == 0
    assert counts / 10_000 == pytest.approx(WEIGHTS, abs=0.1)


def test_without_replacement_heavy_samples_come_first_and_each_comes_once() -> None:
    sampling = WeightedSampling(WEIGHTS, 4, replacement=False)
    orders = np.array([sampling.order(1, epoch) for epoch in range(4000)])
    assert all(sorted(order) == [1, 2, 3, 4] for order in orders.tolist())
    assert np.mean(orders[:, 0] == 4) == pytest.approx(0.6, abs=0.03)


def test_epochs_differ() -> None:
    sampling = WeightedSampling(WEIGHTS, 30)
    assert sampling.order(0, 0).tolist() != sampling.order(0, 1).tolist()


def test_batches_are_the_same_on_any_number_of_ranks_and_after_a_restart() -> None:
    alone = rows(1)
    assert [len(batch) for batch in alone] == [4, 4, 3] * 2  # 11 draws in each epoch
    assert rows(2) == rows(3) == alone
    assert rows(1, workers=1) == alone
    assert rows(2, start=(1, 1)) == alone[4:]


def test_a_sample_that_is_drawn_again_is_augmented_otherwise() -> None:
    drawn = [row for batch in rows(1) for row in batch]
    assert len({index for index, _ in drawn}) < len(drawn)
    assert len({number for _, number in drawn}) == len(drawn)


def test_repeats_are_counted() -> None:
    assert repeat_numbers(np.array([3, 1, 3, 3, 0, 1])).tolist() == [0, 0, 1, 2, 0, 1]
    assert repeat_numbers(np.array([], np.int64)).tolist() == []


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ([[1.0, 2.0]], {}, r"data.weights have the shape \(1, 2\)"),
        ([1.0, -2.0], {}, "the weight of sample 1 is -2.0: weights have to be finite and not negative"),
        ([float("nan"), 1.0], {}, "the weight of sample 0 is nan"),
        ([0.0, 0.0], {}, "the weights of the 2 samples add up to 0.0"),
        ([1.0, 0.0], {"draws": 2, "replacement": False}, "draws 2 samples without .* but only 1 samples have a weight"),
    ],
)
def test_weights_by_which_nothing_can_be_drawn_are_refused(weights: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        WeightedSampling(np.array(weights), **{"draws": 5, **options})


def test_another_number_of_weights_than_samples_is_refused() -> None:
    with pytest.raises(InputError, match="there are 2 weights for the 6 samples of the training set"):
        list(
            train_batches(
                Drawn(),
                seed=0,
                global_batch=2,
                share=SampleShare(),
                loading=LoadingOptions(sampling=WeightedSampling(np.ones(2), 4)),
            )
        )

"""Inputs divided by features: every rank reads its own columns."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.columns import column_range
from meshwright.data.loading import eval_batches, train_batches
from meshwright.errors import InputError
from meshwright.parallel.weights.layout import shard_ranges

BY_DIMENSION = LoadingOptions(partition="dimension")


@pytest.mark.parametrize(("width", "parts"), [(10, 1), (10, 2), (10, 4), (3, 4), (7, 3)])
def test_columns_are_divided_as_the_rows_of_a_weight(width: int, parts: int) -> None:
    for part in range(parts):
        ((first, length),) = shard_ranges((width,), parts, part)
        assert column_range(width, part, parts) == range(first, first + length)


def _rows() -> TensorDataset:
    return TensorDataset(torch.arange(30.0).reshape(6, 5), torch.arange(6))


def _first_microbatch(dataset: Any, share: SampleShare, loading: LoadingOptions = BY_DIMENSION) -> Any:
    return next(train_batches(dataset, seed=0, global_batch=4, share=share, loading=loading)).microbatches[0]


def test_ranks_get_the_same_samples_and_different_columns() -> None:
    whole = _first_microbatch(_rows(), SampleShare(), LoadingOptions())
    parts = [_first_microbatch(_rows(), SampleShare(0, 1, part, 2)) for part in range(2)]
    assert [part.width for part in parts] == [5, 5]
    assert torch.equal(torch.cat([part.data[0] for part in parts], dim=1), whole.data[0])
    assert all(torch.equal(part.data[1], whole.data[1]) for part in parts)
    evaluated = next(eval_batches(_rows(), batch=3, share=SampleShare(0, 1, 1, 2), loading=BY_DIMENSION))
    assert evaluated.data[0].shape == (3, 2)


def test_a_data_set_that_can_read_columns_reads_only_those_of_the_rank() -> None:
    columns_read: list[tuple[int, int]] = []

    class ReadsColumns(TensorDataset):
        width = 5

        def columns(self, begin: int, end: int) -> TensorDataset:
            columns_read.append((begin, end))
            return TensorDataset(self.tensors[0][:, begin:end], self.tensors[1])

    part = _first_microbatch(ReadsColumns(*_rows().tensors), SampleShare(0, 1, 1, 2))
    assert columns_read == [(3, 5)]
    assert part.data[0].shape == (4, 2)


def test_data_sets_without_columns_are_refused() -> None:
    class Words(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return {"text": "word"}

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(5)

    with pytest.raises(InputError, match="Words are dict: give pairs"):
        _first_microbatch(Words(*_rows().tensors), SampleShare(0, 1, 0, 2))
    with pytest.raises(InputError, match="Stream is a stream: use batch"):
        _first_microbatch(Stream(), SampleShare(0, 1, 0, 2))

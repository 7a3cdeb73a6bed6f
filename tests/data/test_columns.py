"""Inputs divided by features: every rank reads its own columns."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from meshwright.data.batch import Loading, Share
from meshwright.data.columns import columns_of
from meshwright.data.loading import eval_batches, train_batches
from meshwright.errors import InputError
from meshwright.parallel.weights.layout import stretches

BY_DIMENSION = Loading(partition="dimension")


@pytest.mark.parametrize(("width", "parts"), [(10, 1), (10, 2), (10, 4), (3, 4), (7, 3)])
def test_columns_lie_as_the_rows_of_a_weight_do(width: int, parts: int) -> None:
    for part in range(parts):
        ((first, length),) = stretches((width,), parts, part)
        assert columns_of(width, part, parts) == range(first, first + length)


def _rows() -> TensorDataset:
    return TensorDataset(torch.arange(30.0).reshape(6, 5), torch.arange(6))


def _first(dataset: Any, share: Share, loading: Loading = BY_DIMENSION) -> Any:
    return next(train_batches(dataset, seed=0, global_batch=4, share=share, loading=loading)).parts[0]


def test_ranks_have_the_same_samples_and_other_columns() -> None:
    whole = _first(_rows(), Share(), Loading())
    parts = [_first(_rows(), Share(0, 1, part, 2)) for part in range(2)]
    assert [part.width for part in parts] == [5, 5]
    assert torch.equal(torch.cat([part.data[0] for part in parts], dim=1), whole.data[0])
    assert all(torch.equal(part.data[1], whole.data[1]) for part in parts)
    found = next(eval_batches(_rows(), batch=3, share=Share(0, 1, 1, 2), loading=BY_DIMENSION))
    assert found.data[0].shape == (3, 2)


def test_one_that_can_read_columns_is_asked_for_its_own_only() -> None:
    asked: list[tuple[int, int]] = []

    class Reads(TensorDataset):
        width = 5

        def columns(self, begin: int, end: int) -> TensorDataset:
            asked.append((begin, end))
            return TensorDataset(self.tensors[0][:, begin:end], self.tensors[1])

    part = _first(Reads(*_rows().tensors), Share(0, 1, 1, 2))
    assert asked == [(3, 5)]
    assert part.data[0].shape == (4, 2)


def test_what_has_no_columns_is_refused() -> None:
    class Words(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return {"text": "word"}

    class Stream(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            yield torch.zeros(5)

    with pytest.raises(InputError, match="Words are dict: give pairs"):
        _first(Words(*_rows().tensors), Share(0, 1, 0, 2))
    with pytest.raises(InputError, match="Stream is a stream: use batch"):
        _first(Stream(), Share(0, 1, 0, 2))

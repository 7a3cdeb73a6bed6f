"""Which features of a sample's input a rank reads if `data.partition` is `dimension`. Ranks then divide the columns of
the input among them instead of the samples of the batch."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from meshwright.data.samples import read_sample
from meshwright.errors import InputError


def column_range(width: int, part: int, parts: int) -> range:
    """Returns the columns of rank number `part` of `parts` ranks. Columns are divided as the rows of a weight are
    (`shard_ranges` in parallel/weights/layout.py): in equal chunks, of which the last ones may be shorter or empty."""
    chunk = -(-width // parts)
    return range(min(part * chunk, width), min((part + 1) * chunk, width))


class ColumnDataset(Dataset[Any]):
    """A data set whose samples hold only this rank's columns of the input. Columns are the last dimension of a sample's
    first tensor.

    If `dataset` has a method `columns(begin, end)`, which returns the same data set with these columns only, other
    columns are never read. Otherwise whole samples are read, and the other columns are dropped.
    """

    def __init__(self, dataset: Any, part: int, parts: int) -> None:
        self.whole_rows = dataset
        self.width = input_width(dataset)
        columns = column_range(self.width, part, parts)
        reads_columns = callable(getattr(dataset, "columns", None))
        self._dataset = dataset.columns(columns.start, columns.stop) if reads_columns else dataset
        self._kept_columns = None if reads_columns else columns
        if hasattr(self._dataset, "batch_of"):
            self.batch_of = self._batch_of
        elif hasattr(self._dataset, "__getitems__"):
            self.__getitems__ = self._getitems

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._narrow(self._dataset[index])

    def _getitems(self, indices: list[int]) -> list[Any]:
        return [self._narrow(sample) for sample in self._dataset.__getitems__(indices)]

    def _batch_of(self, indices: np.ndarray) -> Any:
        return self._narrow(self._dataset.batch_of(indices))

    def _narrow(self, sample: Any) -> Any:
        if self._kept_columns is None:
            return sample
        first, *others = sample
        return (first[..., self._kept_columns.start : self._kept_columns.stop], *others)


def input_width(dataset: Any) -> int:
    """Returns the number of features of a sample's first tensor: the data set's attribute `width` if it has one,
    otherwise the last dimension of the first tensor of sample 0."""
    width = getattr(dataset, "width", None)
    if isinstance(width, int):
        return width
    if not hasattr(dataset, "__getitem__"):
        raise InputError(f"data.partition is dimension, but {type(dataset).__name__} is a stream: use batch")
    sample = read_sample(dataset, 0)
    if isinstance(sample, tuple | list) and len(sample) > 1 and isinstance(sample[0], torch.Tensor) and sample[0].dim():
        return int(sample[0].shape[-1])
    raise InputError(
        f"data.partition is dimension, which divides the last dimension of a sample's first tensor, but the samples of"
        f" {type(dataset).__name__} are {type(sample).__name__}: give pairs (features, target)"
    )

"""Which features of a sample's input a rank reads, where ranks divide the input rather than the batch."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from meshwright.errors import InputError


def columns_of(width: int, part: int, parts: int) -> range:
    """As a weight's rows are divided (parallel.layout.stretches): equal pieces, the last ones shorter or empty."""
    piece = -(-width // parts)
    return range(min(part * piece, width), min((part + 1) * piece, width))


class Columns(Dataset[Any]):
    """A data set whose inputs hold a rank's columns only: the last dimension of a sample's first tensor.

    One that has a method `columns(begin, end)`, which gives the same data set with these columns only, is never asked
    for the others; of any other one they are thrown away.
    """

    def __init__(self, dataset: Any, part: int, parts: int) -> None:
        self.width = width_of(dataset)
        own = columns_of(self.width, part, parts)
        reads = callable(getattr(dataset, "columns", None))
        self._dataset = dataset.columns(own.start, own.stop) if reads else dataset
        self._cut = None if reads else own
        if hasattr(self._dataset, "batch_of"):
            self.batch_of = self._batch_of
        elif hasattr(self._dataset, "__getitems__"):
            self.__getitems__ = self._getitems

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._narrowed(self._dataset[index])

    def _getitems(self, indices: list[int]) -> list[Any]:
        return [self._narrowed(sample) for sample in self._dataset.__getitems__(indices)]

    def _batch_of(self, indices: np.ndarray) -> Any:
        return self._narrowed(self._dataset.batch_of(indices))

    def _narrowed(self, sample: Any) -> Any:
        if self._cut is None:
            return sample
        first, *others = sample
        return (first[..., self._cut.start : self._cut.stop], *others)


def width_of(dataset: Any) -> int:
    """How many features the first input of a sample has."""
    told = getattr(dataset, "width", None)
    if isinstance(told, int):
        return told
    if not hasattr(dataset, "__getitem__"):
        raise InputError(f"data.partition is dimension, but {type(dataset).__name__} is a stream: use batch")
    sample = dataset[0]
    if isinstance(sample, tuple | list) and len(sample) > 1 and isinstance(sample[0], torch.Tensor) and sample[0].dim():
        return int(sample[0].shape[-1])
    raise InputError(
        f"data.partition is dimension, which divides the last dimension of a sample's first tensor, but the samples of"
        f" {type(dataset).__name__} are {type(sample).__name__}: give pairs (features, target)"
    )

"""Rows of collated batches: the part of a whole global batch that belongs to some of its samples."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import Any

from torch import Tensor

from meshwright.data.samples import collate_samples
from meshwright.model_io.batch import count_listed_samples

Collate = Callable[[list[Any]], Any]


def collate_rows(
    collate: Collate, samples: list[Any], rows: Sequence[range], dataset: Any, indices: Sequence[int]
) -> list[Any]:
    """Collates the samples of a whole batch, and returns its rows in each of these ranges. If the batch has no row for
    each sample, the samples of each range are collated by themselves. The samples have these indices in the data
    set."""
    whole = collate_samples(collate, samples, dataset, indices)
    if has_rows(whole, len(samples)):
        return [take_rows(whole, some, len(samples)) for some in rows]
    parts = [slice(some.start, some.stop) for some in rows]
    return [collate_samples(collate, samples[part], dataset, indices[part]) for part in parts]


def has_rows(batch: Any, samples: int) -> bool:
    """Whether every tensor of a batch has one row for each sample, or no dimensions."""
    if count_listed_samples(batch) is not None:
        return False
    sizes = {len(tensor) for tensor in row_tensors(batch) if tensor.dim()}
    return sizes == {samples}


def take_rows(batch: Any, rows: range, samples: int) -> Any:
    """Returns these rows of a batch for which `has_rows` is true, as tensors of their own: a worker process would
    otherwise send the memory of the whole batch."""
    if isinstance(batch, Tensor):
        return batch[rows.start : rows.stop].clone() if batch.dim() else batch
    if isinstance(batch, Mapping):
        taken: Any = copy(batch)  # it may be a class of its own, such as a tokenizer's
        for key, value in batch.items():
            taken[key] = take_rows(value, rows, samples)
        return taken
    if not isinstance(batch, list | tuple):
        return batch
    if len(batch) == samples and not any(isinstance(item, Tensor | Mapping | list | tuple) for item in batch):
        return batch[rows.start : rows.stop]  # texts or numbers, one for each sample
    parts = [take_rows(item, rows, samples) for item in batch]
    return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)


def row_tensors(batch: Any) -> list[Tensor]:
    """Returns the tensors of a batch."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [tensor for item in batch for tensor in row_tensors(item)] if isinstance(batch, list | tuple) else []

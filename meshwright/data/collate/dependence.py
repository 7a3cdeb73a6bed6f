"""Collate functions whose result depends on the whole batch, such as those that pad to its longest sample.

If each rank collates its own samples, each pads to its own longest one. A mean that counts the padding, or a model that
sees it, then differs from training in one process. Only the rows of the whole batch are right in general:

    batch of a rank = rows of the rank in collate(all samples of the global batch)                       collate_rows

This reads every sample on every rank, so ranks do it only if some samples, collated alone, show that the function
depends on the batch (`find_dependence`), and if that changes the loss, where this can be tried
(train/loop_checks/padding.py). Of a stream, every rank reads all samples anyway. Batches that have no row per sample,
such as packed ones or graphs, are collated by each rank.
"""

from dataclasses import dataclass
from typing import Any

import torch

from meshwright.data.collate.rows import Collate, has_rows, row_tensors, take_rows
from meshwright.data.randomness import preserve_generators, seed_generators
from meshwright.data.samples import dataset_size, read_sample

_MOST_SAMPLES = 64  # that are collated alone


@dataclass(frozen=True)
class BatchDependence:
    """Samples that show that a collate function depends on the batch: two of the smallest, and the largest. `pads` is
    whether their sizes differ; otherwise the values of a sample's row depend on the other samples."""

    small: tuple[Any, Any]
    large: Any
    pads: bool


def find_dependence(dataset: Any, collate: Collate, seed: int) -> BatchDependence | None:
    """Returns samples for which the collate function's result depends on the batch. None if there are none among those
    that are tried, or if its batches cannot be divided into rows. The data set must have random access."""
    with preserve_generators():
        try:
            samples = _spread_samples(dataset, seed)
            alone = [collate([sample]) for sample in samples]
            if len(samples) < 2 or not has_rows(alone[0], 1) or not has_rows(collate(samples[:2]), 2):
                return None
            by_size = sorted(range(len(samples)), key=lambda number: _elements(alone[number]))
            smallest, second, largest = (samples[by_size[place]] for place in (0, 1, -1))
            if len(set(map(_row_shapes, alone))) > 1:
                return BatchDependence((smallest, second), largest, pads=True)
            depends = _depends_on_values(collate, samples, alone[0])
        except Exception:  # it does not take one sample, or one cannot be read: loading tells it, if it matters
            return None
    return BatchDependence((smallest, second), largest, pads=False) if depends else None


def _spread_samples(dataset: Any, seed: int) -> list[Any]:
    """Returns samples from everywhere in the data set."""
    seed_generators(seed, "collate trial")
    size = dataset_size(dataset)
    count = min(size, _MOST_SAMPLES)
    return [read_sample(dataset, number * (size - 1) // max(1, count - 1)) for number in range(count)]


def _depends_on_values(collate: Collate, samples: list[Any], alone: Any) -> bool:
    """Whether the first sample's row depends on the other samples. False for functions that draw random numbers."""
    batches = []
    for seed in (1, 2):
        seed_generators(seed, "collate trial")
        batches.append(collate(samples))
    if not has_rows(batches[0], len(samples)) or not _equal(*batches):
        return False
    return not _equal(take_rows(batches[0], range(1), len(samples)), alone)


def _row_shapes(batch: Any) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape[1:] for tensor in row_tensors(batch))


def _elements(batch: Any) -> int:
    return sum(tensor.numel() for tensor in row_tensors(batch))


def _equal(first: Any, second: Any) -> bool:
    pairs = zip(row_tensors(first), row_tensors(second), strict=True)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in pairs)

"""Data sets of the loading tests. Their samples hold their own index and what the random generators drew for them."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from meshwright.data.loading import Batch, LoadingOptions, SampleShare, train_batches


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


class Augmented(Dataset[Any]):
    """Samples (index, three random numbers)."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, tuple[float, float, float]]:
        return index, draw()


class Stream(IterableDataset[Any]):
    """Samples (epoch, position, three random numbers); splits itself in workers, as many data sets do."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def begin(self) -> int:
        return 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for position in range(self.begin(), self.size):
            if position % workers == worker:
                yield self.epoch, position, draw()


class SeekingStream(Stream):
    """A stream that can begin at any position, and has a length. `sought` lists the positions of all `seek` calls."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.sought: list[int] = []

    def __len__(self) -> int:
        return self.size

    def seek(self, position: int) -> None:
        self.sought.append(position)

    def begin(self) -> int:
        return self.sought[-1]


def as_list(samples: list[Any]) -> list[Any]:
    return samples


def batches(dataset: Any, rank: int = 0, ranks: int = 1, workers: int = 0, **options: Any) -> list[Batch]:
    """All batches of a rank, with samples as lists instead of tensors."""
    options = {"seed": 7, "global_batch": 4, "epochs": 2} | options
    loading = LoadingOptions(workers=workers, collate=as_list)
    return list(train_batches(dataset, share=SampleShare(rank, ranks), loading=loading, **options))


def samples_of(batch: Batch) -> list[Any]:
    """A rank's own samples, without borrowed ones."""
    return [sample for microbatch in batch.microbatches if microbatch.samples for sample in microbatch.data]

"""Which samples of each global batch a data rank trains on.

Trainer's batch size is that of one rank, so a global batch consists of as many successive batches of the loader's batch
sampler as there are ranks. It is the batch that one process has with the same global batch size, also the short one at
the end of an epoch: no sample is repeated or left out. Of a stream, a last batch that has no sample for some data rank
is left out. Shares are equal, or in the proportions of a plan's `shares.samples`.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from accelerate.utils import synchronize_rng_states
from torch.utils.data import DataLoader, IterableDataset

from meshwright.compat.loaders import check_full_batch, loader_like
from meshwright.data.batch import SampleShare
from meshwright.data.prepared import DividedBatches


class RankBatchSampler(DividedBatches):
    """Yields the indices of this data rank's samples of each global batch."""

    def __iter__(self) -> Iterator[list[Any]]:
        synchronize_rng_states(["torch"])  # samplers without a generator of their own draw from it
        yield from super().__iter__()


class RankStream(IterableDataset[Any]):
    """Yields this data rank's samples of each global batch of a stream, which is the same on all ranks."""

    def __init__(self, stream: Any, global_batch: int, drop_last: bool, share: SampleShare) -> None:
        self.stream = stream
        self._global_batch, self._drops_last, self._share = global_batch, drop_last, share

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while batch := list(islice(samples, self._global_batch)):
            own, sizes = self._share.take(batch)
            is_short = len(batch) < self._global_batch
            if all(sizes) and not (is_short and self._drops_last):
                yield from own


def divide_loader(loader: "DataLoader[Any]", ranks: int, share: SampleShare) -> "DataLoader[Any]":
    """Returns a loader like this one that loads a data rank's share of the samples of all `ranks`. If it is one of
    fewer shares, several ranks have the same samples."""
    dataset: Any = loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if share.samples:
        check_full_batch(size and size * ranks, share.samples)
    if isinstance(dataset, IterableDataset):
        assert loader.batch_size is not None
        global_batch = loader.batch_size * ranks
        stream = RankStream(dataset, global_batch, loader.drop_last, share)
        return loader_like(loader, stream, batch_size=len(share.take(range(global_batch))[0]))
    return loader_like(loader, batch_sampler=RankBatchSampler(loader.batch_sampler, share, together=ranks))

"""`RankBatchSampler` and `RankStream`: which samples of each global batch a data rank trains on.

Trainer's batch size is that of one rank, so a global batch consists of as many successive batches of the loader's batch
sampler as there are ranks. It is the batch that one process has with the same global batch size, also the short one at
the end of an epoch: no sample is repeated or left out. Of a stream, a last batch with fewer samples than data ranks is
left out.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

from accelerate.utils import synchronize_rng_states
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from meshwright.compat.loaders import loader_like
from meshwright.data.partition import even_share


class RankBatchSampler(BatchSampler):
    """Yields the indices of this data rank's samples of each global batch.

    `borrows_sample`: the last global batch had no sample for this rank, so one of another rank was yielded, which must
    have no weight. It is False until then.
    """

    def __init__(self, batch_sampler: Any, ranks: int, data_rank: int, data_ranks: int) -> None:
        """`ranks` are all ranks. If `data_ranks` is smaller, several ranks share the same samples."""
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.borrows_sample = False
        self._ranks, self._data_rank, self._data_ranks = ranks, data_rank, data_ranks

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self._ranks if self.drop_last else -(-batches // self._ranks)

    def __iter__(self) -> Iterator[list[Any]]:
        self.borrows_sample = False
        synchronize_rng_states(["torch"])  # samplers without a generator of their own draw from it
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self._ranks)):
            if len(group) < self._ranks and self.drop_last:
                return
            yield self._share(group)

    def _share(self, group: list[list[Any]]) -> list[Any]:
        """This data rank's samples of the global batch that consists of these batches."""
        if len(group) == self._ranks:
            per_rank = self._ranks // self._data_ranks
            own = group[self._data_rank * per_rank : (self._data_rank + 1) * per_rank]
            return [index for batch in own for index in batch]
        indices = [index for batch in group for index in batch]
        positions = even_share(len(indices), self._data_rank, self._data_ranks)
        self.borrows_sample = not positions
        return indices[positions.start : positions.stop] or indices[:1]


class RankStream(IterableDataset[Any]):
    """Yields this data rank's samples of each global batch of a stream, which is the same on all ranks."""

    def __init__(self, stream: Any, global_batch: int, drop_last: bool, data_rank: int, data_ranks: int) -> None:
        self.stream = stream
        self._smallest_batch = global_batch if drop_last else data_ranks
        self._global_batch, self._data_rank, self._data_ranks = global_batch, data_rank, data_ranks

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while batch := list(islice(samples, self._global_batch)):
            if len(batch) >= self._smallest_batch:
                share = even_share(len(batch), self._data_rank, self._data_ranks)
                yield from batch[share.start : share.stop]


def divide_loader(loader: "DataLoader[Any]", ranks: int, data_rank: int, data_ranks: int) -> "DataLoader[Any]":
    """Returns a loader like this one that loads the samples of one data rank only."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset):
        assert loader.batch_size is not None
        share = RankStream(dataset, loader.batch_size * ranks, loader.drop_last, data_rank, data_ranks)
        return loader_like(loader, share, batch_size=loader.batch_size * (ranks // data_ranks))
    return loader_like(loader, batch_sampler=RankBatchSampler(loader.batch_sampler, ranks, data_rank, data_ranks))

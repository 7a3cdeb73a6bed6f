"""`RankBatchSampler` and `RankStream`: which samples of each global batch a data rank trains on.

Trainer's batch size is that of one rank, so a global batch consists of as many successive batches of the loader's batch
sampler as there are ranks. It is the batch that one process has with the same global batch size, also the short one at
the end of an epoch: no sample is repeated or left out. Of a stream, a last batch that has no sample for some data rank
is left out. Shares are equal, or in the proportions of a plan's `shares.samples`.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from accelerate.utils import synchronize_rng_states
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from meshwright.compat.loaders import check_full_batch, loader_like
from meshwright.data.partition import divide


class RankBatchSampler(BatchSampler):
    """Yields the indices of this data rank's samples of each global batch.

    `borrows_sample`: the last global batch had no sample for this rank, so one of another rank was yielded, which must
    have no weight. It is False until then.
    """

    def __init__(
        self, batch_sampler: Any, ranks: int, data_rank: int, data_ranks: int, samples: Sequence[int] = ()
    ) -> None:
        """`ranks` are all ranks. If `data_ranks` is smaller, several ranks share the same samples. `samples` are the
        proportions of the data ranks' shares; empty for equal ones."""
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.borrows_sample = False
        self._ranks, self._data_rank, self._data_ranks, self._samples = ranks, data_rank, data_ranks, samples

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
        if len(group) == self._ranks and not self._samples:
            per_rank = self._ranks // self._data_ranks
            own = group[self._data_rank * per_rank : (self._data_rank + 1) * per_rank]
            return [index for batch in own for index in batch]
        indices = [index for batch in group for index in batch]
        positions = _shares(len(indices), self._data_ranks, self._samples)[self._data_rank]
        self.borrows_sample = not positions
        return indices[positions.start : positions.stop] or indices[:1]


class RankStream(IterableDataset[Any]):
    """Yields this data rank's samples of each global batch of a stream, which is the same on all ranks."""

    def __init__(
        self,
        stream: Any,
        global_batch: int,
        drop_last: bool,
        data_rank: int,
        data_ranks: int,
        samples: Sequence[int] = (),
    ) -> None:
        self.stream = stream
        self._global_batch, self._drops_last = global_batch, drop_last
        self._data_rank, self._data_ranks, self._samples = data_rank, data_ranks, samples

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.stream, "set_epoch"):
            self.stream.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        samples = iter(self.stream)
        while batch := list(islice(samples, self._global_batch)):
            shares = _shares(len(batch), self._data_ranks, self._samples)
            is_short = len(batch) < self._global_batch
            if all(shares) and not (is_short and self._drops_last):
                yield from batch[shares[self._data_rank].start : shares[self._data_rank].stop]


def divide_loader(
    loader: "DataLoader[Any]", ranks: int, data_rank: int, data_ranks: int, samples: Sequence[int] = ()
) -> "DataLoader[Any]":
    """Returns a loader like this one that loads the samples of one data rank only. `samples` are the proportions of the
    data ranks' shares; empty for equal ones."""
    dataset: Any = loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if samples:
        check_full_batch(size and size * ranks, samples)
    if isinstance(dataset, IterableDataset):
        assert loader.batch_size is not None
        share = RankStream(dataset, loader.batch_size * ranks, loader.drop_last, data_rank, data_ranks, samples)
        own = len(_shares(loader.batch_size * ranks, data_ranks, samples)[data_rank])
        return loader_like(loader, share, batch_size=own)
    sampler = RankBatchSampler(loader.batch_sampler, ranks, data_rank, data_ranks, samples)
    return loader_like(loader, batch_sampler=sampler)


def _shares(count: int, data_ranks: int, samples: Sequence[int]) -> list[range]:
    return divide(range(count), data_ranks, samples)

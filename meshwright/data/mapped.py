"""Batches of a data set with random access. One loader serves all epochs, and gets the sample indices of one microbatch
at a time. Therefore there is no stall between epochs."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Subset, default_collate

from meshwright.data.batch import Batch, LoadingOptions, Microbatch, SampleShare
from meshwright.data.collate.rows import collate_rows
from meshwright.data.columns import ColumnDataset
from meshwright.data.partition import BatchPartition, Partition, PartPartition, even_shares, padded_microbatches
from meshwright.data.randomness import preserve_generators, seed_generators
from meshwright.data.samples import collate_samples, dataset_size, is_hugging_face, read_sample, read_samples
from meshwright.data.sampling import repeat_numbers
from meshwright.data.workers import load_items
from meshwright.errors import InputError


class MicrobatchKeys(NamedTuple):
    """Names the samples of one microbatch to load, by the epoch and their indices. `repeats` says for each of them how
    often the epoch had it before, so that random augmentation is another one each time; None if no sample comes
    twice. With `rows`, the samples are those of a whole batch, and the item is a list of these rows of it."""

    epoch: int
    indices: np.ndarray
    repeats: np.ndarray | None = None
    rows: tuple[range, ...] | None = None

    def parts_of_seed(self, position: int) -> tuple[int, ...]:
        """The epoch and the index of a sample, and its number of repeats if it is repeated."""
        repeat = 0 if self.repeats is None else int(self.repeats[position])
        return (self.epoch, int(self.indices[position]), *((repeat,) if repeat else ()))


class MicrobatchDataset(Dataset[Any]):
    """A data set whose items are collated microbatches, with `MicrobatchKeys` as keys. The random generators are seeded
    for each sample.

    If the wrapped data set has `__getitems__`, it is called once for the whole list of indices. If it has `batch_of`,
    that is called instead and returns the collated batch, which is faster for rows that are cheap to read. In both
    cases, the generators are seeded by the first sample of the list only: such data sets are expected to be
    deterministic, or to seed themselves. The collate function draws from the generators in the state in which the last
    sample left them.
    """

    def __init__(self, dataset: Any, seed: int, use: str, loading: LoadingOptions) -> None:
        self._dataset = dataset
        self._seed = seed
        self._use = use
        self._collate = loading.collate or default_collate
        self._reads_lists = _reads_lists(dataset)
        self._reads_batches = loading.collate is None and callable(getattr(dataset, "batch_of", None))

    def __getitem__(self, keys: MicrobatchKeys) -> Any:
        if self._reads_batches:
            with preserve_generators():
                seed_generators(self._seed, self._use, *keys.parts_of_seed(0))
                return read_samples(self._dataset.batch_of, self._dataset, keys.indices)
        indices = keys.indices.tolist()
        with preserve_generators():
            if self._reads_lists:
                seed_generators(self._seed, self._use, *keys.parts_of_seed(0))
                samples = read_samples(self._dataset.__getitems__, self._dataset, indices)
            else:
                samples = [self._sample(keys, position) for position in range(len(indices))]
            if keys.rows is not None:
                return collate_rows(self._collate, samples, keys.rows, self._dataset, indices)
            return collate_samples(self._collate, samples, self._dataset, indices)

    def _sample(self, keys: MicrobatchKeys, position: int) -> Any:
        seed_generators(self._seed, self._use, *keys.parts_of_seed(position))
        return read_sample(self._dataset, int(keys.indices[position]))


@dataclass(frozen=True)
class _PendingBatch:
    """A batch whose microbatches are being loaded. `counts` is the number of samples of each microbatch. The other
    fields are those of `Batch`."""

    counts: list[int]
    samples: int
    epoch: int
    index: int
    last: bool


def train_mapped(
    dataset: Any,
    *,
    seed: int,
    global_batch: int,
    share: SampleShare,
    loading: LoadingOptions,
    accumulation: int,
    start: tuple[int, int],
    epochs: int | None,
    drop_last: bool,
) -> Iterator[Batch]:
    """Yields this rank's part of every global batch of a data set with random access. `loading.train_batches` explains
    the arguments."""
    size = dataset_size(dataset)
    dataset, width = _select_columns(dataset, share, loading)
    partition = make_partition(size, global_batch, share.ranks, loading, seed, drop_last)
    batches = partition.batches
    _check_start(batches, loading.sampling.draws if loading.sampling else size, global_batch, start)
    pending: deque[_PendingBatch] = deque()

    def keys_of_microbatches() -> Iterator[MicrobatchKeys]:
        first_epoch, first_index = start
        numbers = count()  # of the batches that are loaded
        for epoch in count(first_epoch) if epochs is None else range(first_epoch, epochs):
            begin = first_index if epoch == first_epoch else 0
            order = partition.order(epoch) if begin < batches else np.empty(0, np.int64)
            repeats = repeat_numbers(order) if loading.sampling else None
            for index in range(begin, batches):
                proportions = share.proportions(next(numbers))
                shares = partition.shares(index, proportions)
                microbatches = padded_microbatches(shares, share.rank, accumulation)
                counts = [len(positions) for positions in microbatches]
                is_last = index == batches - 1
                pending.append(_PendingBatch(counts, sum(map(len, shares)), epoch, index, is_last))
                if loading.whole_batches:
                    yield _whole_batch(epoch, order, repeats, shares, microbatches)
                    continue
                for positions in microbatches:
                    if positions:
                        chosen = slice(positions.start, positions.stop)
                        yield MicrobatchKeys(epoch, order[chosen], None if repeats is None else repeats[chosen])
                    else:
                        borrowed = partition.borrowed_sample(order, index, share.rank, proportions)
                        yield MicrobatchKeys(epoch, np.array([borrowed]))

    loaded = load_items(MicrobatchDataset(dataset, seed, "sample", loading), loading, keys_of_microbatches())
    for data in loaded:
        batch = pending.popleft()
        parts = data if loading.whole_batches else [data, *(next(loaded) for _ in batch.counts[1:])]
        microbatches = [Microbatch(part, samples, width) for part, samples in zip(parts, batch.counts, strict=True)]
        yield Batch(tuple(microbatches), batch.samples, batch.epoch, batch.index, batch.last)


def _whole_batch(
    epoch: int, order: np.ndarray, repeats: np.ndarray | None, shares: list[range], microbatches: list[range]
) -> MicrobatchKeys:
    """Names all samples of a batch, and the rows of a rank's microbatches. One that has no samples gets the first
    row."""
    begin, end = shares[0].start, shares[-1].stop
    rows = tuple(range(positions.start - begin, positions.stop - begin) or range(1) for positions in microbatches)
    return MicrobatchKeys(epoch, order[begin:end], None if repeats is None else repeats[begin:end], rows)


def _check_start(batches: int, size: int, global_batch: int, start: tuple[int, int]) -> None:
    if batches == 0:
        raise InputError(
            f"an epoch has {size} samples, fewer than the global batch of {global_batch}, and drop_last "
            "leaves nothing to train on: lower global_batch or set drop_last to false"
        )
    first_epoch, first_index = start
    if first_index > batches:
        raise InputError(
            f"cannot continue at batch {first_index} of epoch {first_epoch}: with {size} samples and a global "
            f"batch of {global_batch} an epoch has {batches}: use the data and the global batch of the checkpoint"
        )


def eval_mapped(
    dataset: Any, *, batch: int, share: SampleShare, loading: LoadingOptions, seed: int
) -> Iterator[Microbatch]:
    """Yields this rank's part of a data set with random access, for evaluation. In each round, `batch` samples per rank
    are read; if the last round has fewer samples, ranks share them evenly. `loading.eval_batches` explains the
    arguments."""
    dataset, width = _select_columns(dataset, share, loading)
    rounds = [
        (every, positions) for every, positions in _eval_positions(dataset_size(dataset), batch, share) if positions
    ]
    keys = (_eval_keys(every, positions, loading.whole_batches) for every, positions in rounds)
    loaded = load_items(MicrobatchDataset(dataset, seed, "eval", loading), loading, keys)
    for data, (_, positions) in zip(loaded, rounds, strict=True):
        yield Microbatch(data[0] if loading.whole_batches else data, len(positions), width)


def _eval_positions(size: int, batch: int, share: SampleShare) -> Iterator[tuple[range, range]]:
    """Yields the positions of all ranks in each round of evaluation, and those of this rank; an empty range if a short
    last round leaves none for this rank."""
    for begin in range(0, size, batch * share.ranks):
        positions_of_all_ranks = range(size)[begin : begin + batch * share.ranks]
        yield positions_of_all_ranks, even_shares(positions_of_all_ranks, share.ranks)[share.rank]


def _eval_keys(every: range, positions: range, whole_batches: bool) -> MicrobatchKeys:
    if not whole_batches:
        return MicrobatchKeys(0, np.arange(positions.start, positions.stop))
    rows = (range(positions.start - every.start, positions.stop - every.start),)
    return MicrobatchKeys(0, np.arange(every.start, every.stop), rows=rows)


def _select_columns(dataset: Any, share: SampleShare, loading: LoadingOptions) -> tuple[Any, int | None]:
    """Returns the data set with this rank's columns only, and the number of columns of the whole input. If columns are
    not divided, returns the unchanged data set and None."""
    if loading.partition != "dimension" or share.column_parts == 1:
        return dataset, None
    columns = ColumnDataset(dataset, share.column_part, share.column_parts)
    return columns, columns.width


def make_partition(
    size: int, global_batch: int, ranks: int, loading: LoadingOptions, seed: int = 0, drop_last: bool = False
) -> Partition:
    """Returns the partition that divides `size` samples into global batches and ranks, as `loading` says."""
    if loading.partition == "sample":
        return PartPartition(size, global_batch, ranks, seed, loading.parts or ranks)
    if loading.sampling is not None:
        loading.sampling.check_size(size)
        return BatchPartition(loading.sampling.draws, global_batch, ranks, seed, drop_last, loading.sampling)
    return BatchPartition(size, global_batch, ranks, seed, drop_last)


def _reads_lists(dataset: Any) -> bool:
    """Whether samples are read with one call of `__getitems__`."""
    # A Subset has __getitems__ even if the data set inside has not. Its samples would then share one seed.
    if isinstance(dataset, Subset):
        return _reads_lists(dataset.dataset)
    # `with_transform` of Hugging Face's `datasets` may draw random numbers for each sample.
    if is_hugging_face(dataset) and dataset.format["type"] == "custom":
        return False
    return callable(getattr(dataset, "__getitems__", None))

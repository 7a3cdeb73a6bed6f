"""Batches of a data set with random access: one loader for all epochs, fed with whole microbatches of
(epoch, sample) keys, so that there is no stall between epochs."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, Subset, default_collate

from meshwright.data.batch import Batch, Loading, Microbatch, Share
from meshwright.data.columns import Columns
from meshwright.data.partition import ByBatch, ByPart, Partition, even_shares, parts
from meshwright.data.randomness import generators_kept, seed_generators
from meshwright.data.workers import fetched
from meshwright.errors import InputError


class Fetch(NamedTuple):
    """One microbatch to load: samples of one epoch."""

    epoch: int
    indices: np.ndarray


class Fetched(Dataset[Any]):
    """Makes collated data of a `Fetch`, each sample with its own seed.

    A data set with `__getitems__` is asked once for the whole list, seeded by the list's first sample: such
    data sets are expected to be deterministic, or to seed themselves. So is one with `batch_of`, which makes the
    collated batch itself, for rows that are cheaper to read than to hand over one by one. The collate function draws on
    from the last sample's.
    """

    def __init__(self, dataset: Any, seed: int, use: str, loading: Loading) -> None:
        self._dataset = dataset
        self._seed = seed
        self._use = use
        self._collate = loading.collate or default_collate
        self._whole_lists = _takes_lists(dataset)
        self._whole_batches = loading.collate is None and callable(getattr(dataset, "batch_of", None))

    def __getitem__(self, fetch: Fetch) -> Any:
        epoch = fetch.epoch
        if self._whole_batches:
            with generators_kept():
                seed_generators(self._seed, self._use, epoch, int(fetch.indices[0]))
                return self._dataset.batch_of(fetch.indices)
        indices = fetch.indices.tolist()
        with generators_kept():
            if self._whole_lists:
                seed_generators(self._seed, self._use, epoch, indices[0])
                samples = self._dataset.__getitems__(indices)
            else:
                samples = [self._sample(epoch, index) for index in indices]
            return self._collate(samples)

    def _sample(self, epoch: int, index: int) -> Any:
        seed_generators(self._seed, self._use, epoch, index)
        return self._dataset[index]


@dataclass(frozen=True)
class _Outline:
    """A batch whose data is still being loaded."""

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
    share: Share,
    loading: Loading,
    accumulation: int,
    start: tuple[int, int],
    epochs: int | None,
    drop_last: bool,
) -> Iterator[Batch]:
    size = _size(dataset)
    dataset, width = _own_columns(dataset, share, loading)
    division = division_of(size, global_batch, share.ranks, loading, seed, drop_last)
    batches = division.batches
    if batches == 0:
        raise InputError(
            f"the data set has {size} samples, fewer than the global batch of {global_batch}, and drop_last "
            "leaves nothing to train on: lower global_batch or set drop_last to false"
        )
    first_epoch, first_index = start
    if first_index > batches:
        raise InputError(
            f"cannot go on at batch {first_index} of epoch {first_epoch}: with {size} samples and a global "
            f"batch of {global_batch} an epoch has {batches}: use the data and the batch it was saved with"
        )
    outlines: deque[_Outline] = deque()

    def fetches() -> Iterator[Fetch]:
        for epoch in count(first_epoch) if epochs is None else range(first_epoch, epochs):
            begin = first_index if epoch == first_epoch else 0
            order = division.order(epoch) if begin < batches else np.empty(0, np.int64)
            for index in range(begin, batches):
                shares = division.shares(index)
                pieces = parts(shares, share.rank, accumulation)
                counts = [len(piece) for piece in pieces]
                outlines.append(_Outline(counts, sum(map(len, shares)), epoch, index, index == batches - 1))
                for piece in pieces:
                    own = order[piece.start : piece.stop]
                    yield Fetch(epoch, own if piece else np.array([division.spare(order, index, share.rank)]))

    loaded = fetched(Fetched(dataset, seed, "sample", loading), loading, fetches())
    for data in loaded:
        outline = outlines.popleft()
        microbatches = [Microbatch(data, outline.counts[0], width)]
        microbatches += [Microbatch(next(loaded), samples, width) for samples in outline.counts[1:]]
        yield Batch(tuple(microbatches), outline.samples, outline.epoch, outline.index, outline.last)


def eval_mapped(dataset: Any, *, batch: int, share: Share, loading: Loading, seed: int) -> Iterator[Microbatch]:
    """Rounds of `batch` samples a rank; the short last round is shared evenly."""
    dataset, width = _own_columns(dataset, share, loading)
    own = [positions for positions in _rounds(_size(dataset), batch, share) if positions]
    fetches = (Fetch(0, np.arange(positions.start, positions.stop)) for positions in own)
    loaded = fetched(Fetched(dataset, seed, "eval", loading), loading, fetches)
    for data, positions in zip(loaded, own, strict=True):
        yield Microbatch(data, len(positions), width)


def _rounds(size: int, batch: int, part: Share) -> Iterator[range]:
    for begin in range(0, size, batch * part.ranks):
        everyone = range(size)[begin : begin + batch * part.ranks]
        yield even_shares(everyone, part.ranks)[part.rank]


def _own_columns(dataset: Any, share: Share, loading: Loading) -> tuple[Any, int | None]:
    if loading.partition != "dimension" or share.parts == 1:
        return dataset, None
    own = Columns(dataset, share.part, share.parts)
    return own, own.width


def division_of(
    size: int, global_batch: int, ranks: int, loading: Loading, seed: int = 0, drop_last: bool = False
) -> Partition:
    """Which of `size` samples go together, and to whom."""
    if loading.partition == "sample":
        return ByPart(size, global_batch, ranks, seed, loading.parts or ranks)
    return ByBatch(size, global_batch, ranks, seed, drop_last)


def _takes_lists(dataset: Any) -> bool:
    # A Subset has __getitems__ whatever is inside, and would then draw all samples from one seed.
    if isinstance(dataset, Subset):
        return _takes_lists(dataset.dataset)
    return callable(getattr(dataset, "__getitems__", None))


def _size(dataset: Any) -> int:
    name = type(dataset).__name__
    try:
        size = len(dataset)
    except (TypeError, NotImplementedError):
        raise InputError(
            f"the data set {name} has no length: give it __len__, or make it an IterableDataset to stream it"
        ) from None
    if size == 0:
        raise InputError(f"the data set {name} is empty: there is nothing to load")
    return size

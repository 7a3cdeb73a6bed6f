"""Batches of a stream (`IterableDataset`): the p-th item of its iteration is sample p of the epoch, batch k
is positions [kB, (k+1)B), and ranks split it by position.

A stream yields the same items on every rank and in every worker: it does not split itself. It may have

- `set_epoch(epoch)`, called before every epoch;
- `seek(position)`, called before every epoch: the next `iter()` begins with that sample of the epoch (0
  unless a run is resumed inside the epoch). Without it a resumed run reads and drops what it has seen.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from meshwright.data.batch import Batch, Loading, Microbatch, Share
from meshwright.data.partition import even_shares, parts
from meshwright.data.randomness import generators_kept, seed_generators
from meshwright.data.workers import fetched
from meshwright.errors import InputError

_log = logging.getLogger("meshwright.data")


@dataclass(frozen=True)
class _Reading:
    """One epoch of a stream, from batch `first` on."""

    seed: int
    use: str
    epoch: int
    batch: int
    share: Share
    accumulation: int = 1
    first: int = 0
    drop_last: bool = False
    borrow: bool = True


class _Batches(IterableDataset[Any]):
    """Yields for each global batch its size and this rank's microbatches. Worker w of n makes batches w,
    w + n, ..., which is the order in which the loader takes them."""

    def __init__(self, dataset: Any, reading: _Reading, loading: Loading) -> None:
        self._dataset = dataset
        self._reading = reading
        self._collate = loading.collate or default_collate

    def __iter__(self) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reading = self._reading
        samples = self._samples()
        for index in count(reading.first):
            with generators_kept(), _worker_unseen():
                chosen = list(islice(samples, reading.batch))
                if not chosen or (reading.drop_last and len(chosen) < reading.batch):
                    return
                mine = (index - reading.first) % workers == worker
                data = self._microbatches(index, chosen) if mine else []
            if mine:
                yield len(chosen), data

    def _samples(self) -> Iterator[Any]:
        reading = self._reading
        begin = reading.first * reading.batch
        seed_generators(reading.seed, f"{reading.use} stream", reading.epoch)
        samples = iter(self._dataset)
        for position in count(begin if hasattr(self._dataset, "seek") else 0):
            # Also before a sample that is dropped, which may draw what a later one depends on.
            seed_generators(reading.seed, reading.use, reading.epoch, position)
            try:
                sample = next(samples)
            except StopIteration:
                return
            if position >= begin:
                yield sample

    def _microbatches(self, index: int, chosen: list[Any]) -> list[tuple[Any, int]]:
        reading = self._reading
        collated = []
        shares = even_shares(range(len(chosen)), reading.share.ranks)
        for piece in parts(shares, reading.share.rank, reading.accumulation):
            if piece or reading.borrow:
                # All ranks have read the same samples: their collate functions shall not draw the same.
                position = index * reading.batch + piece.start
                seed_generators(reading.seed, f"{reading.use} collate", reading.epoch, position)
                own = chosen[piece.start : piece.stop] if piece else chosen[:1]
                collated.append((self._collate(own), len(piece)))
        return collated


@contextmanager
def _worker_unseen() -> Iterator[None]:
    """Hides from a data set that it is in a worker: many then yield only every n-th sample or shard, and the
    rest would be lost, since here each worker picks its own batches out of the whole stream."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def train_stream(
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
    if loading.partition != "batch":
        raise InputError(
            f"data.partition is {loading.partition}, which wants to know where each sample lies, but"
            f" {type(dataset).__name__} is a stream: use batch, or give the data set __len__ and __getitem__"
        )
    first_epoch, first_index = start
    for epoch in count(first_epoch) if epochs is None else range(first_epoch, epochs):
        first = first_index if epoch == first_epoch else 0
        reading = _Reading(seed, "sample", epoch, global_batch, share, accumulation, first, drop_last, borrow=True)
        held: Batch | None = None  # until it is known whether another one follows
        for index, (samples, data) in enumerate(_read(dataset, reading, loading), first):
            if held is not None:
                yield held
            microbatches = tuple(Microbatch(*piece) for piece in data)
            held = Batch(microbatches, samples, epoch, index, last=False)
        if held is not None:
            yield replace(held, last=True)
        elif first == 0:
            least = f"at least {global_batch} samples (drop_last is set)" if drop_last else "samples"
            raise InputError(
                f"the stream {type(dataset).__name__} ended before its first batch in epoch {epoch}: every "
                f"iter() must give {least}"
            )


def eval_stream(dataset: Any, *, batch: int, share: Share, loading: Loading, seed: int) -> Iterator[Microbatch]:
    """Rounds of `batch` samples a rank; the short last round is shared evenly."""
    reading = _Reading(seed, "eval", 0, batch * share.ranks, share, borrow=False)
    empty = True
    for _, data in _read(dataset, reading, loading):
        empty = False
        for piece in data:
            yield Microbatch(*piece)
    if empty:
        raise InputError(f"the stream {type(dataset).__name__} is empty: every iter() must give samples")


def _read(dataset: Any, reading: _Reading, loading: Loading) -> Iterator[Any]:
    position = reading.first * reading.batch
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(reading.epoch)
    if hasattr(dataset, "seek"):
        dataset.seek(position)
    elif position and reading.share.rank == 0:
        _log.warning(
            "%s has no seek(position): reading and dropping %d samples to go on at batch %d of epoch %d",
            type(dataset).__name__,
            position,
            reading.first,
            reading.epoch,
        )
    return fetched(_Batches(dataset, reading, loading), loading)

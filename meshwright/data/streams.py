"""Batches of a stream (`IterableDataset`): item p of its iteration is sample p of the epoch, global batch k is the
positions [kB, (k+1)B), and ranks divide each batch by position.

A stream must yield the same items on every rank and in every worker: it must not split itself. It may have

- `set_epoch(epoch)`, which is called before every epoch;
- `seek(position)`, which is called before every epoch: the next `iter()` must begin with the sample at this position of
  the epoch (0 unless a run is resumed inside the epoch);
- `state_dict()`, which says what comes next, and `load_state_dict(state)`, after which the next `iter()` begins there.
  The streams of Hugging Face's `datasets` have both. Checkpoints keep the state from before their last batch. A resumed
  run reads this batch again and compares it, because not every stream continues exactly: `datasets` loses the samples
  that were in a shuffle buffer.

If a stream has neither, or if it gives another batch, a resumed run reads and drops all samples before its position.
"""

import json
import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any

import torch.utils.data._utils.worker as torch_worker  # private; seen to work on torch 2.11, 2.13 and 2.15
from torch.utils.data import IterableDataset, default_collate, get_worker_info

from meshwright.data.batch import Batch, LoadingOptions, Microbatch, SampleShare, StreamState
from meshwright.data.collate.rows import collate_rows
from meshwright.data.digest import digest_samples
from meshwright.data.partition import padded_microbatches
from meshwright.data.randomness import preserve_generators, seed_generators
from meshwright.data.samples import check_undivided, collate_samples, name_of
from meshwright.data.workers import load_items
from meshwright.errors import InputError
from meshwright.user.code import raise_user_code_error

_log = logging.getLogger("meshwright.data")


@dataclass(frozen=True)
class _StreamEpoch:
    """Which batches of one epoch to read: from batch number `first` on, each of `batch` samples over all ranks. `use`
    is part of the random seeds; training and evaluation have different ones. With `borrow`, a rank that gets no sample
    of a batch gets a copy of the batch's first sample. `state` is that of a checkpoint after batch `first` - 1; None if
    there is none. `loaded` is the number of batches that were loaded before batch `first`."""

    seed: int
    use: str
    epoch: int
    batch: int
    share: SampleShare
    accumulation: int = 1
    first: int = 0
    drop_last: bool = False
    borrow: bool = True
    state: StreamState | None = None
    loaded: int = 0

    @property
    def begin(self) -> int:
        """The position of the first sample to read."""
        return self.first * self.batch


_StreamBatch = tuple[int, list[tuple[Any, int]], StreamState | None]


class _StreamBatches(IterableDataset[Any]):
    """Yields, for each global batch, its number of samples, this rank's collated microbatches and the stream's state.
    Worker w of n yields batches w, w + n, ...; the loader takes one batch from each worker in turn, so batches arrive
    in order."""

    def __init__(self, dataset: Any, reading: _StreamEpoch, loading: LoadingOptions) -> None:
        check_undivided(dataset)
        self._dataset = dataset
        self._reading = reading
        self._collate = loading.collate or default_collate
        self._whole_batches = loading.whole_batches

    def __iter__(self) -> Iterator[_StreamBatch]:
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        reading = self._reading
        with preserve_generators(), _worker_info_hidden():
            dataset, samples = self._open(prints=worker == 0 and reading.share.rank == 0)
            # Before its first sample, a stream may still have the state of an earlier pass.
            state = _state_of(dataset) if reading.begin else None
        for index in count(reading.first):
            with preserve_generators(), _worker_info_hidden():
                global_batch = list(islice(samples, reading.batch))
                if not global_batch or (reading.drop_last and len(global_batch) < reading.batch):
                    return
                is_of_this_worker = (index - reading.first) % workers == worker
                data = self._microbatches(index, global_batch) if is_of_this_worker else []
                stream = StreamState(state, digest_samples(global_batch)) if is_of_this_worker and state else None
                state = _state_of(dataset)
            if is_of_this_worker:
                yield len(global_batch), data, stream

    def _open(self, prints: bool) -> tuple[Any, Iterator[Any]]:
        """Returns the stream that is iterated over, and its samples from position `begin` on. `prints` is whether this
        process says that samples are read and dropped."""
        reading, dataset = self._reading, self._dataset
        if hasattr(dataset, "seek"):
            return dataset, self._samples(dataset, reading.begin)
        continued = self._continue()
        if continued is not None:
            return continued
        samples = self._samples(self._dataset, 0)
        if prints and reading.begin:
            self._tell_that_samples_are_dropped()
        last_batch = deque(islice(samples, reading.begin), maxlen=reading.batch)
        if prints and reading.state is not None and digest_samples(last_batch) != reading.state.digest:
            _log.warning(
                "%s does not give the samples that it gave before the checkpoint, at batch %d of epoch %d: seed what it"
                " shuffles, and keep its files as they were",
                name_of(self._dataset),
                reading.first - 1,
                reading.epoch,
            )
        return self._dataset, samples

    def _continue(self) -> tuple[Any, Iterator[Any]] | None:
        """Returns a copy of the stream that has continued at the state of the checkpoint, and its samples from position
        `begin` on. None if there is no state, or if the stream does not give the last batch again."""
        reading = self._reading
        if reading.state is None:
            return None
        try:
            # A copy, because the stream itself has to begin anew with its next `iter()`.
            dataset = deepcopy(self._dataset)
            dataset.load_state_dict(reading.state.before)
            samples = self._samples(dataset, reading.begin - reading.batch)
            last_batch = list(islice(samples, reading.batch))
        except Exception:  # it cannot be copied, or the state is that of other code or of other files
            return None
        return (dataset, samples) if digest_samples(last_batch) == reading.state.digest else None

    def _tell_that_samples_are_dropped(self) -> None:
        reading = self._reading
        reason = "has no seek(position)" if reading.state is None else "does not continue exactly after load_state_dict"
        _log.warning(
            "%s %s: reading and dropping %d samples to continue at batch %d of epoch %d",
            name_of(self._dataset),
            reason,
            reading.begin,
            reading.first,
            reading.epoch,
        )

    def _samples(self, dataset: Any, position: int) -> Iterator[Any]:
        """Yields the samples of the stream, of which the first one is at this position of the epoch."""
        reading = self._reading
        name = name_of(dataset)
        seed_generators(reading.seed, f"{reading.use} stream", reading.epoch)
        try:
            samples = iter(dataset)
        except BaseException as error:
            raise_user_code_error(error, f"iter() of the stream {name}")
        for place in count(position):
            # Dropped samples are seeded too: they may draw numbers that later samples depend on.
            seed_generators(reading.seed, reading.use, reading.epoch, place)
            try:
                sample = next(samples)
            except StopIteration:
                return
            except BaseException as error:
                raise_user_code_error(error, f"sample {place} of the stream {name}")
            yield sample

    def _microbatches(self, index: int, global_batch: list[Any]) -> list[tuple[Any, int]]:
        """Returns this rank's microbatches as pairs (collated data, number of samples that count)."""
        reading = self._reading
        collated = []
        shares = reading.share.divide(range(len(global_batch)), reading.loaded + index - reading.first)
        microbatches = padded_microbatches(shares, reading.share.rank, reading.accumulation)
        if self._whole_batches:
            return self._rows_of_whole(index, global_batch, microbatches)
        for positions in microbatches:
            if positions or reading.borrow:
                # All ranks have read the same samples, so their generators are equal here. Seeding by position lets
                # their collate functions draw different numbers.
                batch_begin = index * reading.batch
                seed_generators(reading.seed, f"{reading.use} collate", reading.epoch, batch_begin + positions.start)
                read = positions or range(1)
                samples, indices = global_batch[read.start : read.stop], [batch_begin + position for position in read]
                batch = collate_samples(self._collate, samples, self._dataset, indices)
                collated.append((batch, len(positions)))
        return collated

    def _rows_of_whole(self, index: int, global_batch: list[Any], microbatches: list[range]) -> list[tuple[Any, int]]:
        """The same, but the whole batch is collated, on all ranks with the same random numbers."""
        reading, begin = self._reading, index * self._reading.batch
        wanted = [positions for positions in microbatches if positions or reading.borrow]
        if not wanted:
            return []
        seed_generators(reading.seed, f"{reading.use} collate", reading.epoch, begin)
        indices = list(range(begin, begin + len(global_batch)))
        rows = [positions or range(1) for positions in wanted]
        batches = collate_rows(self._collate, global_batch, rows, self._dataset, indices)
        return [(batch, len(positions)) for batch, positions in zip(batches, wanted, strict=True)]


@contextmanager
def _worker_info_hidden() -> Iterator[None]:
    """Within this context, `get_worker_info()` returns None, so that a data set does not notice that it runs in a
    worker. Many data sets yield only every n-th sample in a worker. Here every worker reads all samples, so the other
    samples would be lost."""
    info = torch_worker._worker_info
    torch_worker._worker_info = None
    try:
        yield
    finally:
        torch_worker._worker_info = info


def _state_of(dataset: Any) -> dict[str, Any] | None:
    """Returns what comes next in a stream, as its `state_dict` says it. None if it has no such method, if its state is
    not a dict of plain values that a checkpoint can keep, or if it has `seek`, which needs no state."""
    if hasattr(dataset, "seek") or not (hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")):
        return None
    try:
        state = dataset.state_dict()
    except BaseException as error:
        raise_user_code_error(error, f"state_dict of the stream {name_of(dataset)}")
    try:
        return state if isinstance(state, dict) and json.loads(json.dumps(state)) == state else None
    except (TypeError, ValueError):
        return None


def train_stream(
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
    state: StreamState | None,
) -> Iterator[Batch]:
    """Yields this rank's part of every global batch of a stream. `loading.train_batches` explains the arguments."""
    if loading.partition != "batch":
        raise InputError(
            f"data.partition is {loading.partition}, which needs random access to samples, but"
            f" {type(dataset).__name__} is a stream: use batch, or give the data set __len__ and __getitem__"
        )
    first_epoch, first_index = start
    loaded = 0
    for epoch in count(first_epoch) if epochs is None else range(first_epoch, epochs):
        first = first_index if epoch == first_epoch else 0
        reading = _StreamEpoch(
            seed, "sample", epoch, global_batch, share, accumulation, first, drop_last, borrow=True, loaded=loaded
        )
        if first and state is not None:
            reading = replace(reading, state=state)
        previous: Batch | None = None  # yielded once it is known whether another one follows
        for index, (samples, data, stream) in enumerate(_read(dataset, reading, loading), first):
            if previous is not None:
                yield previous
            loaded += 1
            microbatches = tuple(Microbatch(*microbatch) for microbatch in data)
            previous = Batch(microbatches, samples, epoch, index, last=False, stream=stream)
        if previous is not None:
            yield replace(previous, last=True)
        elif first == 0:
            least = f"at least {global_batch} samples (drop_last is set)" if drop_last else "samples"
            raise InputError(
                f"the stream {type(dataset).__name__} ended before its first batch in epoch {epoch}: every "
                f"iter() must give {least}"
            )


def read_stream(
    dataset: Any, *, seed: int, epoch: int, batch: int, share: SampleShare, loading: LoadingOptions, drop_last: bool
) -> Iterator[tuple[Microbatch, int]]:
    """Yields this rank's part of each batch of one pass over a stream, and the batch's number of samples over all
    ranks. Does not call `set_epoch` and `seek` of the stream, which are left to the caller."""
    reading = _StreamEpoch(seed, "sample", epoch, batch, share, drop_last=drop_last)
    for samples, ((data, local_samples),), _ in load_items(_StreamBatches(dataset, reading, loading), loading):
        yield Microbatch(data, local_samples), samples


def eval_stream(
    dataset: Any, *, batch: int, share: SampleShare, loading: LoadingOptions, seed: int
) -> Iterator[Microbatch]:
    """Yields this rank's part of a stream, for evaluation. In each round, `batch` samples per rank are read; if the
    last round has fewer samples, ranks share them evenly. `loading.eval_batches` explains the arguments."""
    reading = _StreamEpoch(seed, "eval", 0, batch * share.ranks, share.even, borrow=False)
    is_empty = True
    for _, data, _ in _read(dataset, reading, loading):
        is_empty = False
        for microbatch in data:
            yield Microbatch(*microbatch)
    if is_empty:
        raise InputError(f"the stream {type(dataset).__name__} is empty: every iter() must give samples")


def _read(dataset: Any, reading: _StreamEpoch, loading: LoadingOptions) -> Iterator[_StreamBatch]:
    try:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(reading.epoch)
        if hasattr(dataset, "seek"):
            dataset.seek(reading.begin)
    except BaseException as error:
        raise_user_code_error(error, f"starting epoch {reading.epoch} of the stream {name_of(dataset)}")
    return load_items(_StreamBatches(dataset, reading, loading), loading)

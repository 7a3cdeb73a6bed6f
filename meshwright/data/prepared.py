"""A user's `DataLoader`, of which a data rank loads its share of every batch: `PreparedLoader` for loops of a session
and `DividedBatches` for loops of other libraries, which keep their own samplers, loaders and random numbers.

Batch k of a prepared loader on one process is the global batch k on any number of ranks. Rank 0 takes it from the
loader's sampler and sends the indices of its samples to the other ranks. These iterate over their samplers, too, and
ignore what they get: where ranks are seeded alike, their random generators stay alike. A rank then reads its share of
the samples, in worker processes if the loader has some, and calls the loader's `collate_fn` with these samples only;
or, if the result depends on the whole batch (collate/dependence.py), with all samples of the batch, and takes its rows.

The generators are seeded for each sample (`randomness.py`), so random augmentation does not depend on the number of
ranks either.
"""

import operator
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, default_collate

from meshwright.data.batch import LoadingOptions, SampleShare
from meshwright.data.mapped import MicrobatchDataset, MicrobatchKeys
from meshwright.data.streams import read_stream
from meshwright.data.workers import load_items
from meshwright.errors import InputError
from meshwright.messages.exchange import broadcast_value
from meshwright.user.code import raise_user_code_error


@dataclass(frozen=True)
class PreparedShare:
    """One rank's share of a batch. `samples` is the number of its samples that count: 0 if the batch has no sample for
    this rank, which then has one sample of another rank as `data`. `global_samples` is the number of samples over all
    ranks, and `most_samples` that of the rank with the most; None if they are not known. `number` is that
    of the batch: the session's number of steps when the loop began + its number in the loop."""

    data: Any
    samples: int
    global_samples: int | None = None
    most_samples: int | None = None
    number: int = 0


class PreparedLoader:
    """Iterates over this rank's shares of a loader's batches, once for each `for` loop over it. `samples` is the number
    of samples that count in the share that was yielded last, 0 if the batch had none for this rank. `note` is called
    with each share before it is yielded, and with None at the end of the loop."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        share: SampleShare,
        seed: int,
        steps: Callable[[], int],
        note: Callable[[PreparedShare | None], None],
        move: Callable[[Any], Any],
        whole_batches: bool = False,
    ) -> None:
        """`steps` returns the number of steps that the session has made; random augmentation depends on its value when
        a loop begins, and on `seed`. `move` returns a batch on the session's device. With `whole_batches`, every rank
        collates whole batches."""
        check_divisible(loader)
        self._loader = loader
        self._share = share
        self._seed = seed
        self._steps = steps
        self._note = note
        self._move = move
        self._whole_batches = whole_batches
        self.samples = 0

    def __len__(self) -> int:
        """The number of batches, as of the loader."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        try:
            for loaded in self._shares():
                share = replace(loaded, data=self._move(loaded.data))
                self._note(share)
                self.samples = share.samples
                yield share.data
        finally:
            self._note(None)

    def _shares(self) -> Iterator[PreparedShare]:
        loading = replace(loading_of(self._loader), whole_batches=self._whole_batches)
        if isinstance(self._loader.dataset, IterableDataset):
            return self._shares_of_stream(loading)
        return self._shares_of_samples(loading)

    def _share_now(self) -> SampleShare:
        """This rank's share, in a loop that begins now."""
        return replace(self._share, first=self._steps())

    def _shares_of_samples(self, loading: LoadingOptions) -> Iterator[PreparedShare]:
        sizes: deque[list[int]] = deque()  # of the batches that are being loaded: how many samples each rank has
        epoch, share = self._steps(), self._share_now()

        def keys() -> Iterator[MicrobatchKeys]:
            for number, indices in enumerate(_index_batches(self._loader)):
                rows, of_ranks = share.take(range(len(indices)), number)
                sizes.append(of_ranks)
                if loading.whole_batches:
                    yield MicrobatchKeys(epoch, np.array(indices, np.int64), rows=(rows,))
                else:
                    yield MicrobatchKeys(epoch, np.array(indices[rows.start : rows.stop], np.int64))

        dataset = MicrobatchDataset(self._loader.dataset, self._seed, "sample", loading)
        for number, data in enumerate(load_items(dataset, loading, keys()), share.first):
            of_ranks = sizes.popleft()
            rows = data[0] if loading.whole_batches else data
            yield PreparedShare(rows, of_ranks[share.rank], sum(of_ranks), max(of_ranks), number)

    def _shares_of_stream(self, loading: LoadingOptions) -> Iterator[PreparedShare]:
        loader, share = self._loader, self._share_now()
        assert loader.batch_size is not None
        batches = read_stream(
            loader.dataset,
            seed=self._seed,
            epoch=self._steps(),
            batch=loader.batch_size,
            share=share,
            loading=loading,
            drop_last=loader.drop_last,
        )
        for number, (microbatch, samples) in enumerate(batches):
            most = max(map(len, share.divide(range(samples), number)))
            yield PreparedShare(microbatch.data, microbatch.samples, samples, most, share.first + number)


class DividedBatches(BatchSampler):
    """Yields the indices of a data rank's samples of each global batch, which consists of `together` successive batches
    of a batch sampler: the same one on all ranks. `sizes` are the numbers of samples of the data ranks in the batch
    that was read last. A rank without any gets the first sample, which must have no weight."""

    def __init__(
        self, batch_sampler: Any, share: SampleShare, together: int = 1, note: Callable[[list[int]], None] | None = None
    ) -> None:
        """`note` is called with the `sizes` of each batch that is read."""
        self.batch_sampler = batch_sampler
        self.batch_size = getattr(batch_sampler, "batch_size", None)  # type: ignore[assignment]
        self.drop_last = getattr(batch_sampler, "drop_last", False)
        self.sampler = getattr(batch_sampler, "sampler", None)  # type: ignore[assignment]
        self.configure(share, together, note)

    def configure(self, share: SampleShare, together: int = 1, note: Callable[[list[int]], None] | None = None) -> None:
        self.share, self.together, self._note = share, together, note
        self.sizes: list[int] | None = None

    def __len__(self) -> int:
        batches = len(self.batch_sampler)
        return batches // self.together if self.drop_last else -(-batches // self.together)

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes = None
        for group in self.groups():
            own, self.sizes = self._take(group)
            if self._note is not None:
                self._note(self.sizes)
            yield own

    def groups(self) -> Iterator[list[list[Any]]]:
        """Yields the batches of which each global batch consists."""
        batches = iter(self.batch_sampler)
        while group := list(islice(batches, self.together)):
            if len(group) == self.together or not self.drop_last:
                yield group

    def _take(self, group: list[list[Any]]) -> tuple[list[Any], list[int]]:
        per_rank, rest = divmod(len(group), self.share.ranks)
        if per_rank and not rest and len(group) == self.together and not self.share.samples:  # whole batches
            parts = [list(chain(*group[n : n + per_rank])) for n in range(0, len(group), per_rank)]
            return parts[self.share.rank], [len(part) for part in parts]
        return self.share.take(list(chain(*group)))


def check_divisible(loader: Any) -> None:
    """Raises an `InputError` if this is not a `DataLoader` whose batches can be divided among ranks."""
    if not isinstance(loader, DataLoader):
        raise InputError(
            f"session.prepare divides the batches of a torch DataLoader, and this is a {type(loader).__name__}: give a"
            " DataLoader, or give the data set to session.batches"
        )
    if isinstance(loader.sampler, DistributedSampler):
        raise InputError(
            "the loader has a DistributedSampler, which divides the data set among ranks already: leave the sampler"
            " out, or loop over the loader without session.prepare"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        raise InputError(
            "the loader has batch_size=None, so its items are batches that cannot be divided: give it a batch_size, or"
            " divide the batches in your data set and loop over the loader without session.prepare"
        )


def refuse_loader(dataset: Any, instead: str) -> None:
    """Raises an `InputError` that says `instead` if a `DataLoader` was given where a data set is expected."""
    if isinstance(dataset, DataLoader):
        raise InputError(f"{instead} (this is a DataLoader of {type(dataset.dataset).__name__})")


class _Indices(Dataset[Any]):
    """A data set whose samples are their indices."""

    def __getitem__(self, index: Any) -> Any:
        return index


def _index_batches(loader: "DataLoader[Any]") -> Iterator[list[int]]:
    """Yields the indices of the samples of each batch, as the sampler of rank 0 gives them, on every rank."""
    # A DataLoader draws from its generator what it draws on one process, so the sampler gives the same order there.
    batches = iter(
        DataLoader(_Indices(), batch_sampler=loader.batch_sampler, collate_fn=list, generator=loader.generator)
    )
    while True:
        indices = broadcast_value(_next_indices(batches, type(loader.batch_sampler).__name__))
        if indices is None:
            return
        yield indices


def _next_indices(batches: Iterator[list[Any]], name: str) -> list[int] | None:
    """Returns the indices of the next batch; None at the end."""
    try:
        batch = next(batches, None)
    except BaseException as error:
        raise_user_code_error(error, f"the sampler of the loader ({name})")
    if batch is None:
        return None
    if not batch:
        raise InputError(f"{name} gave a batch without samples: leave empty batches out")
    try:
        return [operator.index(index) for index in batch]
    except TypeError:
        raise InputError(
            f"{name} gave {batch[0]!r} as the index of a sample: session.prepare needs samplers that give whole numbers"
        ) from None


def loading_of(loader: "DataLoader[Any]") -> LoadingOptions:
    """Returns the loader's options of how samples are read and collated."""
    with_workers = {
        "prefetch_factor": loader.prefetch_factor,
        "multiprocessing_context": loader.multiprocessing_context,
    }
    return LoadingOptions(
        workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        collate=None if loader.collate_fn is default_collate else loader.collate_fn,
        start_worker=loader.worker_init_fn,
        loader_options={"timeout": loader.timeout, **(with_workers if loader.num_workers else {})},
    )

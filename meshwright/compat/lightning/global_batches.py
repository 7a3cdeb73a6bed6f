"""`GlobalBatchLoader`: a user's loader, each batch of which is divided among the data ranks. Batch k is the same on any
number of ranks, and a run that is resumed within an epoch continues with the next batch."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler

from meshwright.compat.loaders import loader_like
from meshwright.data.batch import SampleShare
from meshwright.data.collate.dependence import find_dependence
from meshwright.data.order import derive_seed
from meshwright.data.prepared import PreparedLoader, PreparedShare, check_divisible, loading_of


class GlobalBatchLoader:
    """Yields this rank's share of each batch of a `DataLoader`. Shuffling depends on the seed and the epoch alone, and
    so does random augmentation. Lightning saves and loads `state_dict`: how many batches of the epoch are over."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        share: SampleShare,
        seed: int,
        epoch: Callable[[], int],
        note: Callable[[PreparedShare | None], None],
        begin: Callable[[], None],
        batches_begun: Callable[[], int],
    ) -> None:
        """`epoch` returns the number of the epoch, and `batches_begun` how many of its batches were begun, or 0 at its
        end. `begin` is called when a loop begins; `note` with each share before it is yielded, and with None at the
        end."""
        check_divisible(loader)
        self._loader = loader
        self._share = share
        self._seed = seed
        self._epoch = epoch
        self._note = note
        self._begin = begin
        self._batches_begun = batches_begun
        self._skipped = 0
        self._whole_batches: bool | None = None  # whether ranks collate whole batches; None before the first loop

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        skipped, self._skipped = self._skipped, 0
        loader = self._loader
        if skipped:  # their samples are not read
            loader = loader_like(loader, batch_sampler=_LaterBatches(loader.batch_sampler, skipped))
        if self._whole_batches is None:
            self._whole_batches = self._share.ranks > 1 and _depends_on_batch(loader, self._seed)
        prepared = PreparedLoader(
            loader, self._share, self._seed, self._epoch, self._note, lambda batch: batch, self._whole_batches
        )
        batches = iter(prepared)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(derive_seed(self._seed, "order", self._epoch()))
            first = next(batches, None)  # samplers draw their order when their first index is read
        if first is not None:
            yield first
            yield from batches

    def state_dict(self) -> dict[str, int]:
        return {"batches": self._batches_begun()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._skipped = state["batches"]


def _depends_on_batch(loader: "DataLoader[Any]", seed: int) -> bool:
    """Whether the loader's collate function depends on the whole batch, as one does that pads to its longest sample.
    The loss is in the user's module, so whether it ignores padding is not tried."""
    collate = loading_of(loader).collate
    if collate is None:
        return False
    return isinstance(loader.dataset, IterableDataset) or find_dependence(loader.dataset, collate, seed) is not None


class _LaterBatches(Sampler[list[int]]):
    """A batch sampler without its first batches."""

    def __init__(self, batches: Any, skipped: int) -> None:
        self._batches = batches
        self._skipped = skipped

    def __iter__(self) -> Iterator[list[int]]:
        return islice(iter(self._batches), self._skipped, None)

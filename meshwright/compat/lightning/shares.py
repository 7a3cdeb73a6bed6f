"""Shares of global batches under Lightning: a loader of unequal shares, and the weights of the ranks' losses.

Lightning's batch size is that of one rank, so a global batch consists of the ranks' batches under equal shares. With
its `DistributedSampler`, these are successive positions of one order of the data set, which `ShareLoader` divides anew.

    weight of a rank's loss = ranks · its samples / samples of the global batch                     BatchShare.weight
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from meshwright.compat.loaders import check_full_batch, loader_like
from meshwright.data.batch import SampleShare
from meshwright.data.prepared import DividedBatches
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.train.drive.driver import loss_weight


@dataclass(frozen=True)
class BatchShare:
    """A rank's number of samples of a global batch, that of all ranks, and the rank's weight. The numbers are None if
    they are not known."""

    samples: int | None = None
    global_samples: int | None = None
    weight: float = 1.0


def batch_share(samples: int, global_samples: int, ranks: int) -> BatchShare:
    return BatchShare(samples, global_samples, loss_weight(samples, global_samples, ranks))


class SharesOfLoaders:
    """The shares of the batches that the training's loaders have read. Lightning may read one batch ahead, so `begin`
    tells that the next one is trained on."""

    def __init__(self) -> None:
        self._read: list[deque[BatchShare]] = []
        self._has_begun = False  # whether a batch of these loaders was trained on

    def add_loader(self) -> Callable[[BatchShare | None], None]:
        """Returns the function that a loader calls with the share of each batch, and with None when its loop begins."""
        if self._has_begun:  # Lightning sets up all loaders of a training again
            self._read, self._has_begun = [], False
        shares: deque[BatchShare] = deque()
        self._read.append(shares)
        return lambda share: shares.clear() if share is None else shares.append(share)

    def begin(self) -> BatchShare:
        """The share of the next batch; that of equal ranks if loaders have not told any."""
        self._has_begun = True
        begun = [shares.popleft() for shares in self._read if shares]
        if any(share.weight != begun[0].weight for share in begun):
            raise InputError(
                "loaders that are read together have different shares of their batches on this rank"
                f" ({', '.join(str(share.samples) for share in begun)} samples), so its loss has no single weight: give"
                " them batch sizes that the shares divide equally, or one loader"
            )
        return begun[-1] if begun else BatchShare()


class ShareLoader:
    """Yields this data rank's share of each global batch of a loader with a `DistributedSampler`. `sampler` is the one
    whose epoch Lightning sets."""

    def __init__(
        self, loader: Any, samples: Sequence[int], data_rank: int, note: Callable[[BatchShare | None], None]
    ) -> None:
        """`loader` has the batches of a rank under equal shares."""
        _check(loader, samples)
        self.sampler = _of_all_ranks(loader.sampler)
        self.dataset = loader.dataset
        self._rank, self._note = data_rank, note
        self._read: deque[list[int]] = deque()  # the sizes of batches that the loader has read, and not yielded
        global_batches: Any = BatchSampler(self.sampler, loader.batch_size * len(samples), loader.drop_last)
        share = SampleShare(data_rank, len(samples), samples=tuple(samples))
        self.batch_sampler = DividedBatches(global_batches, share, note=self._read.append)
        self._loader: DataLoader[Any] = loader_like(loader, batch_sampler=self.batch_sampler)

    @property
    def worker_init_fn(self) -> Any:
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        self._note(None)
        self._read.clear()
        for batch in self._loader:
            sizes = self._read.popleft()
            self._note(batch_share(sizes[self._rank], sum(sizes), len(sizes)))
            yield batch
        self._note(None)


def _of_all_ranks(sampler: "DistributedSampler[Any]") -> "DistributedSampler[Any]":
    """A sampler with the samples of all ranks, in the order in which a global batch has them."""
    whole = copy(sampler)
    whole.num_replicas, whole.rank, whole.num_samples = 1, 0, sampler.total_size
    return whole


def _check(loader: Any, samples: Sequence[int]) -> None:
    if not isinstance(loader, DataLoader) or not isinstance(loader.sampler, DistributedSampler):
        raise InputError(
            "the plan has shares, which divide the batches of a DataLoader with Lightning's DistributedSampler, and"
            f" this is a {type(loader).__name__} with {type(getattr(loader, 'sampler', None)).__name__}: leave"
            " use_distributed_sampler as it is and give no stream and no batch_sampler, or leave shares out of the plan"
        )
    if loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
        raise InputError(
            f"the plan has shares, but the loader's batch sampler is a {type(loader.batch_sampler).__name__}: give a"
            " batch_size instead, or leave shares out of the plan"
        )
    if loader.sampler.num_replicas != len(samples):
        raise InputError(
            f"the loader's DistributedSampler is for {loader.sampler.num_replicas} ranks, but the plan has shares for"
            f" {len(samples)}: leave the sampler out, and Lightning adds one"
        )
    check_full_batch(loader.batch_size * len(samples), samples)


def check_equal_shapes(tensor: Any) -> None:
    """Raises an `InputError` if ranks are about to gather tensors of different shapes, which unequal shares make of
    batches. All ranks call this together."""
    shapes = all_gather_values(list(tensor.shape)) if isinstance(tensor, Tensor) else []
    if any(shape != shapes[0] for shape in shapes):
        raise InputError(
            f"all_gather needs the same shape on every rank, but shares are unequal ({', '.join(map(str, shapes))}):"
            " pad the tensors, or use a metric of torchmetrics"
        )

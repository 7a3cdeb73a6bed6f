"""`deepspeed.runtime.dataloader`: the loader of `initialize(training_data=…)`."""

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset


class DeepSpeedDataLoader:
    """Loads a rank's micro batches. As DeepSpeed's, it shuffles in the same order in each epoch, unless the script
    calls `data_sampler.set_epoch`."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        rank: int,
        ranks: int,
        shuffle: bool = True,
        sampler: Any = None,
        collate_fn: Any = None,
        workers: int = 0,
        pin_memory: bool = False,
        drop_last: bool = False,
    ) -> None:
        if sampler is None and not isinstance(dataset, IterableDataset):
            sampler = DistributedSampler(dataset, num_replicas=ranks, rank=rank, shuffle=shuffle)
        self.dataset, self.batch_size, self.data_sampler = dataset, batch_size, sampler
        self.dataloader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            collate_fn=collate_fn,
            num_workers=workers,
            pin_memory=pin_memory,
            drop_last=drop_last,
        )
        self._batches: Iterator[Any] | None = None

    def __iter__(self) -> "DeepSpeedDataLoader":
        self._batches = iter(self.dataloader)
        return self

    def __next__(self) -> Any:
        if self._batches is None:
            self._batches = iter(self.dataloader)
        return next(self._batches)

    def __len__(self) -> int:
        return len(self.dataloader)


class RepeatingLoader:
    """Begins a loader again whenever it has ended."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> "RepeatingLoader":
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)

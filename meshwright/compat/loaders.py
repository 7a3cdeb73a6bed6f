"""Loaders like that of a user, and batches of it."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshwright.data.randomness import preserve_generators
from meshwright.errors import InputError
from meshwright.plan_fields.shares import describe_shares, share_sizes


def loader_like(loader: "DataLoader[Any]", dataset: Any = None, **which_samples: Any) -> "DataLoader[Any]":
    """Returns a loader with the options of this one that loads other samples: those of `which_samples`, which are a
    `batch_sampler` or a `batch_size`, of the data set or of another one."""
    with_workers: dict[str, Any] = (
        {
            "prefetch_factor": loader.prefetch_factor,
            "persistent_workers": loader.persistent_workers,
            "multiprocessing_context": loader.multiprocessing_context,
        }
        if loader.num_workers
        else {}
    )
    return DataLoader(
        loader.dataset if dataset is None else dataset,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        in_order=loader.in_order,
        **which_samples,
        **with_workers,
    )


def batch_of_first_samples(loader: "DataLoader[Any]") -> Any:
    """Returns a batch of the loader's first samples, for a search of plans, without drawing from its sampler; None for
    a stream, which would lose them."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    dataset: Any = loader.dataset
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or 1
    with preserve_generators():
        return loader.collate_fn([dataset[number] for number in range(min(size, len(dataset)))])


def check_full_batch(global_batch: int | None, samples: Sequence[int]) -> None:
    """Raises an `InputError` if shares in the proportions of `samples` leave some data rank without a sample of a full
    global batch. None: the loader does not say how many samples that has."""
    if global_batch is None:
        raise InputError(
            f"the plan has shares ({describe_shares(samples)}), but the loader's batch sampler has no batch_size, so"
            " its batches may be too small for some rank: give a batch_size, or leave shares out of the plan"
        )
    sizes = share_sizes(global_batch, samples)
    if 0 in sizes:
        raise InputError(
            f"of a global batch of {global_batch} samples, plan.shares.samples [{describe_shares(samples)}] gives data"
            f" rank {sizes.index(0)} none: raise the batch size, or give that rank a larger share"
        )

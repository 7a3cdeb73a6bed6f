"""Unequal shares of global batches in loops of Accelerate.

A global batch consists of the batches that the processes have with equal shares, in the order of processes. It is
divided anew in the proportions of the plan's `shares.samples`. So all global batches are those of equal shares, also
the last one of an epoch, which `even_batches` fills with the first samples.

    weight of a process's loss = processes · its samples / samples of the global batch                    loss_weight
"""

from collections.abc import Iterator, Sequence
from itertools import chain, cycle, islice
from typing import Any

import accelerate
import torch
from accelerate.data_loader import BatchSamplerShard
from accelerate.utils import gather as accelerate_gather
from accelerate.utils import recursively_apply
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from meshwright.compat.loaders import check_full_batch
from meshwright.data.batch import SampleShare
from meshwright.data.prepared import DividedBatches
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.plan import Plan
from meshwright.plan_fields.shares import share_sizes


class ShareBatchSampler(DividedBatches, BatchSamplerShard):
    """Divides the global batches of a sampler that Accelerate has made."""

    @property
    def global_batch(self) -> int:
        """The number of samples of a full global batch."""
        return int(self.batch_size) * self.together

    def groups(self) -> Iterator[list[list[Any]]]:
        indices = chain.from_iterable(self.batch_sampler)
        first: list[Any] = []
        while batch := list(islice(indices, self.global_batch)):
            first = first or batch
            missing = self.global_batch - len(batch)
            if missing and self.drop_last:
                return
            yield [batch, list(islice(cycle(first), missing)) if self.even_batches else []]


class SharedBatches(accelerate.Accelerator):
    """The part of an `Accelerator` that divides batches by the plan's shares, and concatenates parts of unequal
    sizes. `plan_is_known` is False before a plan was chosen automatically."""

    plan: Plan
    plan_is_known: bool

    def prepare_data_loader(self, data_loader: Any, *arguments: Any, **keywords: Any) -> Any:
        """As Accelerate's. Under a plan with shares, the loader gives this process its share of each global batch."""
        is_prepared = getattr(data_loader, "_is_accelerate_prepared", False)
        samples = self.plan.shares.samples if self.plan_is_known and not is_prepared else ()
        if samples:
            _check(data_loader, samples, self.dispatch_batches, 1 if self.split_batches else self.num_processes)
        prepared = super().prepare_data_loader(data_loader, *arguments, **keywords)
        if samples and self.num_processes > 1:
            sampler = _sampler_of(prepared)
            sampler.__class__ = ShareBatchSampler
            sampler.configure(
                SampleShare(self.process_index, self.num_processes, samples=tuple(samples)),
                together=1 if self.split_batches else self.num_processes,
            )
        return prepared

    def current_sizes(self) -> list[int] | None:
        """How many samples each process has of the global batch that a prepared loader has given last. None if its
        loop is over, or if it was not divided by shares."""
        loader = self.gradient_state.active_dataloader
        sampler = _sampler_of(loader)
        if not isinstance(sampler, ShareBatchSampler):  # `skip_first_batches` skips batches of it
            sampler = getattr(sampler, "batch_sampler", None)
        if not isinstance(sampler, ShareBatchSampler):
            return None
        if loader.end_of_dataloader:
            return sampler.sizes  # only the last batch may be short
        return list(share_sizes(sampler.global_batch, sampler.share.samples))

    def gather(self, tensor: Any) -> Any:
        """As Accelerate's; under a plan with shares, processes may have different numbers of rows."""
        has_shares = self.plan_is_known and self.plan.shares.samples
        return gather_rows(tensor) if has_shares else super().gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """As Accelerate's, without samples that a process has borrowed from another one."""
        sizes = self.current_sizes()
        if sizes is not None and sizes[self.process_index] == 0:
            input_data = recursively_apply(lambda tensor: tensor[:0] if tensor.dim() else tensor, input_data)
        return super().gather_for_metrics(input_data, use_gather_object)


def _sampler_of(loader: Any) -> Any:
    """The batch sampler of a loader, which torch also takes as its `sampler`."""
    sampler = getattr(loader, "sampler", None)
    return sampler if isinstance(sampler, BatchSampler) else getattr(loader, "batch_sampler", None)


def _check(loader: "DataLoader[Any]", samples: Sequence[int], dispatches: bool | None, processes: int) -> None:
    """Raises an `InputError` if the loader's batches cannot be divided by shares. `processes` is the number of its
    batches of which a global batch consists."""
    if isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "the plan has shares, but the loader reads a stream, which Accelerate divides evenly: leave shares out of"
            " the plan, or train with mw.parallelize (docs/loops.md)"
        )
    if dispatches:
        raise InputError(
            "dispatch_batches is True, so that Accelerate divides each batch evenly, but the plan has shares: leave"
            " one of them out"
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    check_full_batch(size and size * processes, samples)


def gather_rows(data: Any) -> Any:
    """Concatenates the tensors of all processes along their first dimension, of which processes may have different
    sizes. All processes call this together."""
    shapes: list[list[int]] = []
    recursively_apply(lambda tensor: shapes.append(list(tensor.shape)), data, error_on_other_type=True)
    of_ranks = all_gather_values(shapes)
    number = iter(range(len(shapes)))

    def gather(tensor: Tensor) -> Tensor:
        position = next(number)
        shapes_of_ranks = [shapes[position] for shapes in of_ranks]
        if any(shape[1:] != list(tensor.shape[1:]) or len(shape) != tensor.dim() for shape in shapes_of_ranks):
            raise InputError(
                f"gather concatenates tensors along their first dimension, but the processes' tensors have the shapes"
                f" {', '.join(str(tuple(shape)) for shape in shapes_of_ranks)}: call pad_across_processes first"
            )
        if tensor.dim() == 0:
            tensor, shapes_of_ranks = tensor[None], [[1]] * len(shapes_of_ranks)
        rows = [shape[0] for shape in shapes_of_ranks]
        padded = tensor.new_zeros(max(rows), *tensor.shape[1:])
        padded[: len(tensor)] = tensor.detach()
        whole = accelerate_gather(padded).unflatten(0, (len(rows), max(rows)))
        return torch.cat([of_rank[:count] for of_rank, count in zip(whole, rows, strict=True)])

    return recursively_apply(gather, data, error_on_other_type=True)

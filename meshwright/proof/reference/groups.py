"""Decides which samples the one-device reference puts into one forward pass.

A model without batch statistics gets the whole global batch at once. Where a forward pass depends on the batch as a
whole (BatchNorm) or draws random numbers for it (dropout, if it is left on), it runs over the groups of samples that
the plan makes:

- local BatchNorm: every microbatch of every data rank by itself; running statistics are those of data rank 0, which
  all of the plan's ranks take over;
- synchronized BatchNorm: microbatch k of all data ranks together.

An `nn.SyncBatchNorm` is synchronized under every plan.

A short last batch may have fewer samples than all ranks together have microbatches. A microbatch that would be empty
then holds a sample borrowed from elsewhere in the data set. Borrowed samples count neither in the loss nor in the
statistics, so the reference leaves them out.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshwright.data.collate.dependence import find_dependence
from meshwright.data.loading import Batch, Microbatch, SampleShare, is_stream
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.reference.rank_shares import rank_shares
from meshwright.proof.reference.reference_setup import ReferenceSetup
from meshwright.proof.torch_private import AnyBatchNorm, tree_flatten, tree_unflatten
from meshwright.train.step.batch import samples_in

Grouping = Literal["whole", "local", "synchronized"]


@dataclass(frozen=True)
class SampleGroup:
    """Samples that go through the model in one forward pass.

    `data` holds `samples` samples. `rank` is the data rank whose random seed is used, and `seeds_rank` is True for the
    first group of that rank in a step. BatchNorm's running statistics are updated from this group only if
    `updates_statistics`.
    """

    data: Any
    samples: int
    rank: int = 0
    seeds_rank: bool = True
    updates_statistics: bool = True


@dataclass(frozen=True)
class GlobalBatch:
    """One global batch, divided into the groups of samples that go through the model together."""

    groups: tuple[SampleGroup, ...]
    last_of_epoch: bool


def choose_grouping(model: nn.Module, plan: Plan, dropout: bool, compares_samples: bool = False) -> Grouping:
    """Returns how the reference must group samples. It is `whole` in each of three cases: the plan makes a single
    group, nothing in the model depends on the grouping, or the loss compares all samples with each other
    (`compares_samples`)."""
    if plan.batch_parts == 1:
        return "whole"
    if compares_samples:
        if dropout or any(uses_batch_statistics(module) for module in model.modules()):
            raise InputError(
                "the loss compares all samples of a global batch with each other, and the model has layers that treat"
                " each rank's samples separately (BatchNorm, or dropout that is on): one device cannot do both at once,"
                " so such a plan cannot be compared"
            )
        return "whole"
    if not any(uses_batch_statistics(module) for module in model.modules()):
        return "local" if dropout else "whole"
    if plan.numerics.batch_norm == "synchronized":
        return "synchronized"
    torch_synchronizes = {
        isinstance(module, nn.SyncBatchNorm) for module in model.modules() if uses_batch_statistics(module)
    }
    if torch_synchronizes == {True, False}:
        raise InputError(
            "the model has nn.SyncBatchNorm and layers with statistics of each rank's own samples: one device cannot"
            " normalize over both in one pass, so such a plan cannot be compared: set numerics.batch_norm to"
            " synchronized"
        )
    return "synchronized" if True in torch_synchronizes else "local"


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether the module's output depends on the batch as a whole. This is the case for BatchNorm and for any other
    module with running statistics, if it is in training mode. In eval mode such modules only use the running
    statistics."""
    if not module.training:
        return False
    return isinstance(module, AnyBatchNorm) or isinstance(getattr(module, "running_mean", None), Tensor)


def describe_grouping(grouping: Grouping, plan: Plan, batch_statistics: bool) -> str | None:
    """Returns a note for the proof on how the reference grouped samples; None if it took the whole batch at once."""
    if grouping == "whole":
        return None
    shape = f"{plan.data_ranks} data ranks × {plan.microbatches} microbatches"
    if grouping == "synchronized":
        return (
            f"BatchNorm is synchronized ({shape}): the one-device reference normalizes over each microbatch of all"
            " data ranks together, as the plan does"
        )
    if batch_statistics:
        return (
            f"BatchNorm is local ({shape}): the one-device reference normalizes over the same groups of samples, and"
            " its running statistics are those of data rank 0, as under the plan"
        )
    return f"dropout ({shape}): the one-device reference draws each data rank's masks for its own microbatches"


def global_batches(setup: ReferenceSetup, plan: Plan, grouping: Grouping) -> Iterator[GlobalBatch]:
    """Yields the global batches of the training in order, each divided into groups."""
    if grouping == "whole":
        for batch in setup.batches(SampleShare(0, 1), 1):
            (microbatch,) = batch.microbatches
            yield GlobalBatch((SampleGroup(microbatch.data, microbatch.samples),), batch.last)
        return
    # Microbatches are loaded as each rank loads them, because a collate function's result may depend on which samples
    # it gets. If it does, they are rows of whole batches (data/collate/dependence.py).
    setup = replace(setup, loading=replace(setup.loading, whole_batches=_depends_on_batch(setup)))
    batches_by_rank = [setup.batches(share, plan.microbatches) for share in rank_shares(plan, setup.global_batch)]
    for batches in zip(*batches_by_rank, strict=False):
        groups = _local_groups(batches) if grouping == "local" else _synchronized_groups(batches)
        yield GlobalBatch(tuple(groups), batches[0].last)


def _depends_on_batch(setup: ReferenceSetup) -> bool:
    """Whether the collate function depends on the whole batch."""
    collate = setup.loading.collate
    if collate is None or setup.loading.partition == "sample":
        return False
    return is_stream(setup.data) or find_dependence(setup.data, collate, setup.seed) is not None


def _local_groups(batches: tuple[Batch, ...]) -> Iterator[SampleGroup]:
    for rank, batch in enumerate(batches):
        for number, microbatch in enumerate(batch.microbatches):
            if microbatch.samples:
                yield SampleGroup(
                    microbatch.data,
                    microbatch.samples,
                    rank=rank,
                    seeds_rank=number == 0,
                    updates_statistics=rank == 0,
                )


def _synchronized_groups(batches: tuple[Batch, ...]) -> Iterator[SampleGroup]:
    for number, microbatches in enumerate(zip(*(batch.microbatches for batch in batches), strict=True)):
        counted = [microbatch for microbatch in microbatches if microbatch.samples]
        samples = sum(microbatch.samples for microbatch in counted)
        yield SampleGroup(_concatenate(counted), samples, seeds_rank=number == 0)


def _concatenate(microbatches: list[Microbatch]) -> Any:
    """Returns the data of several microbatches, joined to that of one microbatch."""
    flat = [tree_flatten(microbatch.data) for microbatch in microbatches]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_concatenate_leaf(list(column), microbatches) for column in columns], flat[0][1])


def _concatenate_leaf(leaves: list[Any], microbatches: list[Microbatch]) -> Any:
    """Returns the concatenated leaves if each has one row per sample; otherwise the first leaf, which is the same for
    all samples."""
    per_sample = all(
        isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples_in(microbatch.data)
        for leaf, microbatch in zip(leaves, microbatches, strict=True)
    )
    return torch.cat(leaves) if per_sample else leaves[0]

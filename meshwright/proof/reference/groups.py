"""Over which samples the one-device reference makes one forward pass.

A plain model takes the whole global batch at once. Where a forward pass looks at the batch as a whole (BatchNorm's
statistics) or draws from it (dropout, when asked for), it is made over the groups that the plan makes:

- local BatchNorm: every microbatch of every data rank by itself; running statistics are those of data rank 0,
  which the plan's ranks take over;
- synchronized BatchNorm: microbatch k of all data ranks together.

A short batch may not suffice for everybody's microbatches. What is borrowed to fill it has no weight, but BatchNorm
sees it: synchronized statistics count it, and so do running ones where a pipeline runs a microbatch again.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshwright.data.loading import Batch, Microbatch, Share
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.reference.setting import Setting
from meshwright.train.step.batch import samples_in
from meshwright.train.step.loss import LossFunction

Grouping = Literal["whole", "local", "synchronized"]


@dataclass(frozen=True)
class Group:
    """Samples that go through the model together: behind `samples` that count in the loss, `borrowed` ones that do not.
    `rank` is the data rank whose randomness they meet, `first` of its groups in a step; only with `counts` do running
    statistics learn from them."""

    data: Any
    samples: int
    borrowed: int = 0
    rank: int = 0
    first: bool = True
    counts: bool = True


@dataclass(frozen=True)
class GlobalBatch:
    groups: tuple[Group, ...]
    last: bool  # of the epoch


def grouping(model: nn.Module, plan: Plan, dropout: bool, loss: LossFunction | None = None) -> Grouping:
    """How the reference must group samples; `whole` where the plan makes one group of them anyway, and where the loss
    compares all of them with each other."""
    if plan.shares == 1:
        return "whole"
    if hasattr(loss, "joined"):
        if dropout or any(looks_at_the_batch(module) for module in model.modules()):
            raise InputError(
                "the loss compares all samples of a global batch with each other, and the model has layers that treat"
                " each rank's samples apart (BatchNorm, or dropout that is on): no one device does both at once, so"
                " such a plan cannot be compared"
            )
        return "whole"
    if not any(looks_at_the_batch(module) for module in model.modules()):
        return "local" if dropout else "whole"
    return plan.numerics.batch_norm


def looks_at_the_batch(module: nn.Module) -> bool:
    """BatchNorm in training, and whatever else keeps running statistics. Frozen ones only use what they have."""
    if not module.training:
        return False
    return isinstance(module, _BatchNorm) or isinstance(getattr(module, "running_mean", None), Tensor)


def describe(kind: Grouping, plan: Plan, batch_statistics: bool) -> str | None:
    """What a reader must know of how the reference was computed."""
    if kind == "whole":
        return None
    shape = f"{plan.data_ranks} data ranks × {plan.microbatches} microbatches"
    if kind == "synchronized":
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


def global_batches(setting: Setting, plan: Plan, kind: Grouping) -> Iterator[GlobalBatch]:
    if kind == "whole":
        for batch in setting.batches(Share(0, 1), 1):
            (part,) = batch.parts
            yield GlobalBatch((Group(part.data, part.samples),), batch.last)
        return
    ranks = plan.data_ranks
    # Loaded as each rank loads it: what a collate function makes of a microbatch may depend on its samples.
    loaded = [setting.batches(Share(rank, ranks), plan.microbatches) for rank in range(ranks)]
    for given in zip(*loaded, strict=False):
        batches = tuple(_filled(batch, plan) for batch in given)
        groups = _local(batches) if kind == "local" else _synchronized(batches)
        yield GlobalBatch(tuple(groups), batches[0].last)


def _filled(batch: Batch, plan: Plan) -> Batch:
    """A pipeline's schedule has a fixed number of microbatches: of fewer, the last one runs again."""
    missing = plan.microbatches - len(batch.parts) if plan.axes.pipeline > 1 else 0
    again = (replace(batch.parts[-1], samples=0),) * missing
    return replace(batch, parts=(*batch.parts, *again))


def _local(batches: tuple[Batch, ...]) -> Iterator[Group]:
    for rank, batch in enumerate(batches):
        for number, part in enumerate(batch.parts):
            if part.samples or rank == 0:  # what another rank borrows leaves no trace
                borrowed = 0 if part.samples else samples_in(part.data)
                yield Group(part.data, part.samples, borrowed, rank, number == 0, counts=rank == 0)


def _synchronized(batches: tuple[Batch, ...]) -> Iterator[Group]:
    for number, parts in enumerate(zip(*(batch.parts for batch in batches), strict=True)):
        ordered = sorted(parts, key=lambda part: part.samples == 0)  # borrowed ones behind the others
        borrowed = sum(samples_in(part.data) for part in parts if not part.samples)
        yield Group(_joined(ordered), sum(part.samples for part in parts), borrowed, 0, number == 0)


def _joined(parts: list[Microbatch]) -> Any:
    flat = [tree_flatten(part.data) for part in parts]
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return tree_unflatten([_concatenated(list(column), parts) for column in columns], flat[0][1])


def _concatenated(column: list[Any], parts: list[Microbatch]) -> Any:
    per_sample = all(
        isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == samples_in(part.data)
        for value, part in zip(column, parts, strict=True)
    )
    return torch.cat(column) if per_sample else column[0]

"""`Setting`: a question's model, loss, optimizer and data, made anew and in the precision of the comparison.

Every rank and the reference make their own: initial weights are a function of (seed, name), so they are the same.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import IterableDataset, default_collate

from meshwright.call import bind, build
from meshwright.data.loading import Batch, Loading, Share, train_batches
from meshwright.job import Job
from meshwright.proof.question import DTYPES, OwnModel, Question
from meshwright.proof.reference.dropout import without_dropout
from meshwright.train.build import build_data, build_loading, build_model, frozen_modules, schedule_unit
from meshwright.train.session import MakeOptimizer, MakeSchedule
from meshwright.train.step.loss import LossFunction
from meshwright.train.step.optimizer import optimizer_groups, optimizer_on, rebuild_optimizer


@dataclass(frozen=True)
class Setting:
    """`dropped` is how many probabilities of dropout were set to zero."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None
    schedule_per: Literal["step", "epoch"]
    loss: LossFunction | None
    data: Any
    loading: Loading
    global_batch: int
    drop_last: bool
    clip_norm: float | None
    seed: int
    target: str | None
    frozen: tuple[str, ...]
    dtype: torch.dtype
    dropped: int

    def sample(self) -> Any:
        """A batch of two, for plans that want to see what the model gets."""
        first = islice(self.data, 2) if isinstance(self.data, IterableDataset) else [self.data[0]] * 2
        data = (self.loading.collate or default_collate)(list(first))
        return tree_map(lambda value: _cast(value, self.dtype) if isinstance(value, Tensor) else value, data)

    def batches(self, share: Share, microbatches: int) -> Iterator[Batch]:
        """What a data rank is given, in the precision of the comparison."""
        found = train_batches(
            self.data,
            seed=self.seed,
            global_batch=self.global_batch,
            share=share,
            loading=self.loading,
            accumulation=microbatches,
            drop_last=self.drop_last,
        )
        return (in_dtype(batch, self.dtype) for batch in found)


def set_up(question: Question) -> Setting:
    subject = question.subject
    made = _of_job(subject, question) if isinstance(subject, Job) else _of_model(subject, question)
    dtype = DTYPES[question.dtype]
    made.model._apply(lambda tensor: _cast(tensor, dtype))
    dropped = 0 if question.dropout else without_dropout(made.model)
    if made.loading.partition == "sample":  # one device reads the parts that the ranks have, in the same order
        parts = made.loading.parts or question.plan.data_ranks
        made = replace(made, loading=replace(made.loading, parts=parts))
    return replace(made, loss=_loss_in(made.loss, dtype), dtype=dtype, dropped=dropped)


def in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """A batch whose floating-point tensors have the dtype."""

    def cast(value: Any) -> Any:
        return _cast(value, dtype) if isinstance(value, Tensor) else value

    parts = tuple(replace(part, data=tree_map(cast, part.data)) for part in batch.parts)
    return replace(batch, parts=parts)


@contextmanager
def computing_in(dtype: torch.dtype) -> Iterator[None]:
    """What a model makes anew while it runs (positions, masks) has the dtype of its weights, too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _of_job(job: Job, question: Question) -> Setting:
    data, _ = build_data(job)
    model = build_model(job)
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    if job.schedule:
        make_schedule = partial(build, job.schedule, role="schedule")
    return Setting(
        model=model,
        make_optimizer=partial(optimizer_on, job.optimizer, optimizer_groups(job.optimizer, model)),
        make_schedule=make_schedule,
        schedule_per=schedule_unit(job),
        loss=bind(job.loss, "loss") if job.loss else None,
        data=data,
        # A few steps are not worth the start of worker processes, which change no sample.
        loading=replace(build_loading(job, torch.device("cpu")), workers=0, pin_memory=False),
        global_batch=job.train.global_batch,
        drop_last=job.data.drop_last,
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
        target=job.data.target,
        frozen=frozen_modules(model) if job.train.freeze else (),
        dtype=DTYPES[question.dtype],
        dropped=0,
    )


def _of_model(own: OwnModel, question: Question) -> Setting:
    model = deepcopy(own.model)  # the caller's object keeps its weights and its precision
    names = {id(parameter): name for name, parameter in own.model.named_parameters()}
    return Setting(
        model=model,
        make_optimizer=lambda held: rebuild_optimizer(own.optimizer, names, held),
        make_schedule=own.schedule,
        schedule_per="step",
        loss=own.loss,
        data=own.data,
        loading=Loading(collate=own.collate),
        global_batch=own.global_batch,
        drop_last=False,
        clip_norm=own.clip_norm,
        seed=own.seed,
        target=own.target,
        frozen=(),
        dtype=DTYPES[question.dtype],
        dropped=0,
    )


def _loss_in(loss: LossFunction | None, dtype: torch.dtype) -> LossFunction | None:
    """A loss with its own tensors (class weights) in the dtype."""
    if isinstance(loss, nn.Module):
        return deepcopy(loss)._apply(lambda tensor: _cast(tensor, dtype))
    if isinstance(loss, partial):
        cast = {
            key: _cast(value, dtype) if isinstance(value, Tensor) else value for key, value in loss.keywords.items()
        }
        inner = _loss_in(loss.func, dtype)
        assert inner is not None
        return partial(inner, *loss.args, **cast)
    return loss


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

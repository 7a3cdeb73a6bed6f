"""`ReferenceSetup`: the model, loss, optimizer and data of a proof request, built in the precision of the comparison.

Every rank and the reference build their own setup. All of them have the same initial weights: those of a job are a
function of (seed, parameter name), and so are those of `start: random`; a user's model is copied with its weights.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from meshwright.data.loading import Batch, LoadingOptions, SampleShare, is_stream, train_batches
from meshwright.job import Job
from meshwright.proof.reference.dropout import disable_dropout
from meshwright.proof.reference.eager_experts import use_eager_experts
from meshwright.proof.reference.random_start import redraw_weights
from meshwright.proof.request import COMPARISON_DTYPES, ProofRequest, UserModel
from meshwright.proof.torch_private import apply_to_tensors, tree_map
from meshwright.train.build import build_data, build_initialized_model, build_loading, frozen_modules, schedule_unit
from meshwright.train.loss.loss import Loss, LossFunction
from meshwright.train.loss.output_form import FakeModel
from meshwright.train.loss.trial import find_loss, find_model_loss
from meshwright.train.session import MakeOptimizer, MakeSchedule
from meshwright.train.shares.check import default_parts
from meshwright.train.step.optimizer import optimizer_for_parameters, optimizer_groups, rebuild_optimizer
from meshwright.user.call import bind, build


@dataclass(frozen=True)
class ReferenceSetup:
    """Everything that a training loop needs. `disabled_dropouts` is the number of dropout probabilities that were set
    to zero. `uses_eager_experts`: mixtures of experts were switched to their eager form. `frozen` holds the names of
    the modules that stay in eval mode."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None
    schedule_per: Literal["step", "epoch"]
    loss: LossFunction | None
    data: Any
    loading: LoadingOptions
    global_batch: int
    drop_last: bool
    clip_norm: float | None
    seed: int
    target: str | None
    frozen: tuple[str, ...]
    dtype: torch.dtype
    disabled_dropouts: int
    uses_eager_experts: bool = False

    @cached_property
    def tried_loss(self) -> Loss:
        """The loss, and what it is a mean over."""
        if self.loss is None:
            return find_model_loss(self.model, self.sample())
        return find_loss(self.loss, FakeModel(self.model), self.sample(), self.target)

    @property
    def compares_samples(self) -> bool:
        """Whether the loss compares all samples of a global batch with each other."""
        return self.tried_loss.kind == "compares_samples" or self.tried_loss.routers is not None

    def sample(self) -> Any:
        """Returns a batch of two samples, for plans that trace the model before they split or cut it."""
        samples = islice(self.data, 2) if is_stream(self.data) else [self.data[0]] * 2
        data = (self.loading.collate or default_collate)(list(samples))
        return data_in_dtype(data, self.dtype)

    def batches(self, share: SampleShare, microbatches: int) -> Iterator[Batch]:
        """Yields the batches that one data rank receives, in the precision of the comparison."""
        batches = train_batches(
            self.data,
            seed=self.seed,
            global_batch=self.global_batch,
            share=share,
            loading=self.loading,
            accumulation=microbatches,
            drop_last=self.drop_last,
        )
        return (batch_in_dtype(batch, self.dtype) for batch in batches)


def build_setup(request: ProofRequest) -> ReferenceSetup:
    """Builds new model, loss, optimizer and data objects for a request. The objects that the request holds are not
    changed."""
    subject = request.subject
    setup = _setup_from_job(subject, request) if isinstance(subject, Job) else _setup_from_user_model(subject, request)
    dtype = COMPARISON_DTYPES[request.dtype]
    if request.start == "random":
        redraw_weights(setup.model, setup.seed)
    apply_to_tensors(setup.model, lambda tensor: _cast(tensor, dtype))
    disabled_dropouts = 0 if request.dropout else disable_dropout(setup.model)
    if setup.loading.partition == "sample":  # one device reads the same parts as the ranks, in the same order
        parts = setup.loading.parts or default_parts(request.plan)
        setup = replace(setup, loading=replace(setup.loading, parts=parts))
    return replace(
        setup,
        loss=_loss_in_dtype(setup.loss, dtype),
        dtype=dtype,
        disabled_dropouts=disabled_dropouts,
        uses_eager_experts=dtype == torch.float64 and use_eager_experts(setup.model),
    )


def batch_in_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with its floating-point tensors converted to the dtype."""
    microbatches = (
        replace(microbatch, data=data_in_dtype(microbatch.data, dtype)) for microbatch in batch.microbatches
    )
    return replace(batch, microbatches=tuple(microbatches))


def data_in_dtype(data: Any, dtype: torch.dtype) -> Any:
    """Returns the data of a batch with its floating-point tensors converted to the dtype."""
    return tree_map(lambda value: _cast(value, dtype) if isinstance(value, Tensor) else value, data)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within this context, `dtype` is torch's default. Tensors that a model creates while it runs (positions, masks)
    then have the dtype of its weights."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _setup_from_job(job: Job, request: ProofRequest) -> ReferenceSetup:
    data, _ = build_data(job)
    model = build_initialized_model(job)
    make_schedule: Callable[[torch.optim.Optimizer], Any] | None = None
    if job.schedule:
        make_schedule = partial(build, job.schedule, role="schedule")
    return ReferenceSetup(
        model=model,
        make_optimizer=partial(optimizer_for_parameters, job.optimizer, optimizer_groups(job.optimizer, model)),
        make_schedule=make_schedule,
        schedule_per=schedule_unit(job),
        loss=bind(job.loss, "loss") if job.loss else None,
        data=data,
        # Worker processes change no sample, and starting them takes longer than a few steps.
        loading=replace(build_loading(job, torch.device("cpu")), workers=0, pin_memory=False),
        global_batch=job.train.global_batch,
        drop_last=job.data.drop_last,
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
        target=job.data.target,
        frozen=frozen_modules(model) if job.train.freeze else (),
        dtype=COMPARISON_DTYPES[request.dtype],
        disabled_dropouts=0,
    )


def _setup_from_user_model(user_model: UserModel, request: ProofRequest) -> ReferenceSetup:
    model = deepcopy(user_model.model)  # the caller's object keeps its weights and its precision
    names = {id(parameter): name for name, parameter in user_model.model.named_parameters()}
    return ReferenceSetup(
        model=model,
        make_optimizer=lambda parameters: rebuild_optimizer(user_model.optimizer, names, parameters),
        make_schedule=user_model.schedule,
        schedule_per="step",
        loss=user_model.loss,
        data=user_model.data,
        loading=LoadingOptions(collate=user_model.collate),
        global_batch=user_model.global_batch,
        drop_last=False,
        clip_norm=user_model.clip_norm,
        seed=user_model.seed,
        target=user_model.target,
        frozen=(),
        dtype=COMPARISON_DTYPES[request.dtype],
        disabled_dropouts=0,
    )


def _loss_in_dtype(loss: LossFunction | None, dtype: torch.dtype) -> LossFunction | None:
    """Returns the loss with the tensors that it holds (such as class weights) converted to the dtype."""
    if isinstance(loss, nn.Module):
        return apply_to_tensors(deepcopy(loss), lambda tensor: _cast(tensor, dtype))
    if isinstance(loss, partial):
        keywords = {
            key: _cast(value, dtype) if isinstance(value, Tensor) else value for key, value in loss.keywords.items()
        }
        inner = _loss_in_dtype(loss.func, dtype)
        assert inner is not None
        return partial(inner, *loss.args, **keywords)
    return loss


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in the dtype if it holds floating-point or complex numbers; unchanged otherwise."""
    if tensor.is_complex():
        return tensor.to(dtype.to_complex())
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

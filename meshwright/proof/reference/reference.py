"""The reference: a plain PyTorch training loop on one device. The only thing that it takes from the plan is how
BatchNorm groups samples."""

import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright.blocks.power_iteration import power_iterations, without_power_iteration
from meshwright.data.order import derive_seed
from meshwright.model_io.batch import ModelBatch, at_least_fp32, split_batch, target_key
from meshwright.parallel.weights.state import dense
from meshwright.proof.reference.groups import GlobalBatch, Grouping, SampleGroup, global_batches
from meshwright.proof.reference.lift_casts import LiftCasts
from meshwright.proof.reference.reference_setup import ReferenceSetup, default_dtype
from meshwright.proof.request import ProofRequest
from meshwright.train.loss.finder import needs_trial
from meshwright.train.loss.loss import Loss, ModelLoss
from meshwright.train.step.batch import move_to_device
from meshwright.train.step.schedule import needs_metric


class PlainTraining:
    """A model in training mode on one device, with its optimizer and learning-rate schedule. Someone else computes the
    gradients."""

    def __init__(self, setup: ReferenceSetup, device: torch.device) -> None:
        self.setup = setup
        self.model = setup.model.to(device)
        self.optimizer = setup.make_optimizer(dict(self.model.named_parameters()))
        schedule = setup.make_schedule(self.optimizer) if setup.make_schedule else None
        # A schedule that needs a metric is stepped after evaluations, and a proof has none.
        self.schedule = None if schedule is None or needs_metric(schedule) else schedule
        self.model.train()
        for name in setup.frozen:
            self.model.get_submodule(name).eval()

    def update(self, last_of_epoch: bool) -> None:
        """Steps the optimizer, and the learning-rate schedule if it is due."""
        self.optimizer.step()
        if self.schedule and (self.setup.schedule_per == "step" or last_of_epoch):
            self.schedule.step()


class Reference(PlainTraining):
    """Trains on one device, step by step. A step consists of `next_batch`, `compute`, `clip` and `update`, between
    which loss, gradients and weights can be read."""

    def __init__(self, setup: ReferenceSetup, request: ProofRequest, grouping: Grouping, device: torch.device) -> None:
        super().__init__(setup, device)
        self.device = device
        self.steps = 0
        self._plan = request.executed_plan
        self._backward_factor: float | Tensor = 1.0  # multiplies the loss before backward
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._lift_casts = LiftCasts() if request.lifts_casts else None
        self._loss = _loss_of(setup, grouping)
        self._power_iterations = power_iterations(self.model)
        self._batches = global_batches(setup, request.plan, grouping)

    def next_batch(self) -> GlobalBatch:
        return next(self._batches)

    def compute(self, batch: GlobalBatch) -> Tensor:
        """Computes the gradients of the mean loss over the valid targets of the global batch, and leaves them in the
        model's `.grad`. Returns the mean loss."""
        loss_sum, count = self._accumulate(batch)
        divisor = self._divisor(count)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(divisor.to(parameter.grad.dtype))
        return loss_sum / divisor

    def _accumulate(self, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """Accumulates in the model the gradients of the loss summed over the global batch. Returns this sum, and the
        number to divide it by for the mean (of samples or valid targets, or the sum of their class weights)."""
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, count = self._zero, self._zero
        for number, group in enumerate(batch.groups):
            if group.seeds_rank:
                self._seed(group.rank)
            # As under the plan, a spectral norm is improved once in a step.
            power_iteration = without_power_iteration(self._power_iterations) if number else nullcontext()
            buffers = _preserve_buffers(self.model, not group.updates_statistics)
            with default_dtype(self.setup.dtype), buffers, power_iteration:
                group_sum, group_count = self._backward(group)
            loss_sum, count = loss_sum + group_sum, count + group_count
            self._after_group(group)
        return loss_sum, count

    def _after_group(self, group: SampleGroup) -> None:
        """A hook for subclasses. It is called when a group's gradients have been added to the model's."""

    def _divisor(self, count: Tensor) -> Tensor:
        """Returns what the sum of the loss is divided by: `count`, or 1 if the job's loss is a sum, or if there is no
        valid target."""
        return torch.ones_like(count) if self._loss.kind == "sum" or count == 0 else count

    def compute_group(self, group: SampleGroup) -> tuple[dict[str, Tensor], float, float]:
        """Computes one group alone. Returns the gradients of the loss summed over the group, this sum, and the number
        to divide it by for the mean."""
        self.optimizer.zero_grad(set_to_none=True)
        if group.seeds_rank:
            self._seed(group.rank)
        with default_dtype(self.setup.dtype):
            loss_sum, count = self._backward(group)
        return self.gradients(), float(loss_sum), float(count)

    @property
    def lifted_casts(self) -> int:
        """How often the model asked for fp32 and got fp64."""
        return self._lift_casts.lifted if self._lift_casts else 0

    @property
    def loss_kind(self) -> str:
        return self._loss.kind

    def clip(self) -> Tensor:
        """Clips the gradients if the setup has a `clip_norm`. Returns their global norm before clipping."""
        limit = self.setup.clip_norm
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if limit is None and any(gradient.layout != torch.strided for gradient in gradients):
            # torch's own function takes dense gradients only
            return torch.stack([dense(gradient).norm() for gradient in gradients]).norm()
        return nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)

    def gradients(self) -> dict[str, Tensor]:
        """Returns copies of the gradients by name, on the CPU. Parameters without a gradient are left out."""
        return {name: dense(p.grad).cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def update(self, last_of_epoch: bool) -> None:
        super().update(last_of_epoch)
        self.steps += 1

    def skip_update(self, last_of_epoch: bool) -> None:
        """Counts a step without an optimizer step. A schedule that counts epochs still sees the epoch's end."""
        self.steps += 1
        if self.schedule and self.setup.schedule_per == "epoch" and last_of_epoch:
            self.schedule.step()

    def _backward(self, group: SampleGroup) -> tuple[Tensor, Tensor]:
        """Runs a group forward and backward, which adds its gradients to the model's. Returns the sum of the loss over
        the group, and the number to divide it by for the mean."""
        model_batch = self._model_batch(group)
        with self._lift_casts or nullcontext():
            return self._backward_of(model_batch, group)

    def _backward_of(self, model_batch: ModelBatch, group: SampleGroup) -> tuple[Tensor, Tensor]:
        with self._loss.forward_context(True):
            output = at_least_fp32(self._forward(model_batch))
        term = self._loss.term(output, model_batch.target, group.samples)
        (term.value * term.weight * self._backward_factor).backward()
        count = term.returned_count
        if count is None:
            count = torch.as_tensor(self._loss.count(model_batch.target, group.samples), device=self.device)
        return term.sum.double(), count.to(self.device).double()

    def _forward(self, model_batch: ModelBatch) -> Any:
        return self.model(*model_batch.arguments, **model_batch.keywords)

    def _model_batch(self, group: SampleGroup) -> ModelBatch:
        return split_batch(
            move_to_device(group.data, self.device), target_key(self.setup.target, self.setup.loss is not None)
        )

    def _seed(self, rank: int) -> None:
        """Seeds all generators as a session does for each step and data rank, so that a model draws the same random
        numbers."""
        seed = derive_seed(self.setup.seed, "step", self.steps, rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _loss_of(setup: ReferenceSetup, grouping: Grouping) -> Loss:
    """Returns the loss of the reference. If the whole batch goes through the model at once, the user's loss is taken as
    it is: whatever it is, its value for the whole batch is right, and shows whether the trial was right as well."""
    if grouping == "whole" and needs_trial(setup.loss):
        return Loss(setup.loss or ModelLoss(), "samples")
    return setup.tried_loss


@contextmanager
def preserve_generators(device: torch.device) -> Iterator[None]:
    """Restores the caller's random generators at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def _preserve_buffers(model: nn.Module, active: bool) -> Iterator[None]:
    """Restores the model's buffers at the end, if active."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()] if active else []
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in before:
                buffer.copy_(value)

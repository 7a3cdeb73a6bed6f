"""The reference: a plain PyTorch loop on one device. It knows of the plan only which samples BatchNorm meets."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from meshwright.batch import Example, at_least_fp32, split
from meshwright.data.order import derive
from meshwright.parallel.weights.state import dense
from meshwright.proof.question import Question
from meshwright.proof.reference.groups import GlobalBatch, Group, Grouping, global_batches
from meshwright.proof.reference.setting import Setting, computing_in
from meshwright.train.step.batch import move
from meshwright.train.step.loss import Loss, models_own, understand


class Trained:
    """A model with its optimizer and schedule."""

    def __init__(self, setting: Setting, device: torch.device) -> None:
        self.setting = setting
        self.model = setting.model.to(device)
        self.optimizer = setting.make_optimizer(dict(self.model.named_parameters()))
        self.schedule = setting.make_schedule(self.optimizer) if setting.make_schedule else None
        self.model.train()
        for name in setting.frozen:
            self.model.get_submodule(name).eval()

    def update(self, last_of_epoch: bool) -> None:
        """The optimizer's step, and the schedule's where it is due."""
        self.optimizer.step()
        if self.schedule and (self.setting.schedule_per == "step" or last_of_epoch):
            self.schedule.step()


class Reference(Trained):
    """`compute`, `clip` and `update` are one step; between them everything can be looked at."""

    def __init__(self, setting: Setting, question: Question, kind: Grouping, device: torch.device) -> None:
        super().__init__(setting, device)
        self.device = device
        self.steps = 0
        self._plan = question.ran
        self._factor: float | Tensor = 1.0  # on what backward starts from
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self._loss: Loss = understand(setting.loss) if setting.loss else models_own()
        self._batches = global_batches(setting, question.plan, kind)

    def next_batch(self) -> GlobalBatch:
        return next(self._batches)

    def compute(self, batch: GlobalBatch) -> Tensor:
        """The mean loss over the global batch's valid targets; its gradients are in the model."""
        loss_sum, count = self._sums(batch)
        total = self._divisor(count)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(total.to(parameter.grad.dtype))
        return loss_sum / total

    def _sums(self, batch: GlobalBatch) -> tuple[Tensor, Tensor]:
        """The loss's sum and count over the global batch; the sum's gradients are in the model."""
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, count = self._zero, self._zero
        for group in batch.groups:
            if group.first:
                self._seed(group.rank)
            with computing_in(self.setting.dtype), _buffers_kept(self.model, not group.counts):
                added, counted = self._backward(group)
            loss_sum, count = loss_sum + added, count + counted
            self._added(group)
        return loss_sum, count

    def _added(self, group: Group) -> None:
        """A group's gradients have been added to the model's."""

    def _divisor(self, count: Tensor) -> Tensor:
        """No target at all: a mean over none of them trains nothing."""
        return torch.ones_like(count) if self._loss.kind == "sum" or count == 0 else count

    def part_of(self, group: Group) -> tuple[dict[str, Tensor], float, float]:
        """One group alone: the gradients of its sum, the sum and its count."""
        self.optimizer.zero_grad(set_to_none=True)
        if group.first:
            self._seed(group.rank)
        with computing_in(self.setting.dtype):
            added, counted = self._backward(group)
        return self.gradients(), float(added), float(counted)

    @property
    def loss_kind(self) -> str:
        return self._loss.kind

    def clip(self) -> Tensor:
        """The gradients' global norm, before they are clipped to what the setting allows."""
        limit = self.setting.clip_norm
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        if limit is None and any(gradient.layout != torch.strided for gradient in gradients):
            return torch.stack([dense(gradient).norm() for gradient in gradients]).norm()  # torch's takes dense ones
        return nn.utils.clip_grad_norm_(self.model.parameters(), float("inf") if limit is None else limit)

    def gradients(self) -> dict[str, Tensor]:
        """By name, on the CPU; those that the step did not reach are left out."""
        return {name: dense(p.grad).cpu().clone() for name, p in self.model.named_parameters() if p.grad is not None}

    def update(self, last_of_epoch: bool) -> None:
        super().update(last_of_epoch)
        self.steps += 1

    def leave_out(self, last_of_epoch: bool) -> None:
        """A step without the optimizer's; epochs pass all the same."""
        self.steps += 1
        if self.schedule and self.setting.schedule_per == "epoch" and last_of_epoch:
            self.schedule.step()

    def _backward(self, group: Group) -> tuple[Tensor, Tensor]:
        """Adds the gradients of a group's part of the sum; returns that part and its count."""
        example = self._example(group)
        with torch.set_grad_enabled(group.samples > 0):
            output = at_least_fp32(self._forward(example))
        if not group.samples:  # only seen by running statistics
            return self._zero, self._zero
        if group.borrowed:
            output = _without_borrowed(output, group)
            example = replace(example, target=_without_borrowed(example.target, group))
        term = self._loss.term(output, example.target, group.samples)
        (term.value * term.weight * self._factor).backward()
        count = self._loss.count(example.target, group.samples) if term.own_count is None else term.own_count
        return term.sum.double(), torch.as_tensor(count, device=self.device).double()

    def _forward(self, example: Example) -> Any:
        return self.model(*example.arguments, **example.keywords)

    def _example(self, group: Group) -> Example:
        return split(move(group.data, self.device), self.setting.target)

    def _seed(self, rank: int) -> None:
        """As a session does for each step and data rank: a model that draws numbers draws the same ones."""
        seed = derive(self.setting.seed, "step", self.steps, rank)
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)


def _without_borrowed(data: Any, group: Group) -> Any:
    """What belongs to samples that count."""
    size = group.samples + group.borrowed

    def cut(value: Any) -> Any:
        per_sample = isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == size
        return value[: group.samples] if per_sample else value

    return tree_map(cut, data)


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Leaves the caller's random generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


@contextmanager
def _buffers_kept(model: nn.Module, kept: bool) -> Iterator[None]:
    before = [(buffer, buffer.clone()) for buffer in model.buffers()] if kept else []
    yield
    with torch.no_grad():
        for buffer, value in before:
            buffer.copy_(value)

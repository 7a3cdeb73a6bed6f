"""The reference in a plan's own precision: one device that rounds where the plan rounds.

Every microbatch of every data rank goes through the model by itself, as under the plan, in the same precision and with
the same factor on its loss, so what is left to differ is the order of sums, and what the tensor axis rounds in parts.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from meshwright.batch import Example
from meshwright.parallel.float8 import eight_bits
from meshwright.parallel.precision import arithmetic, forward_precision, gathered_dtype, travelling_dtype
from meshwright.proof.question import Question
from meshwright.proof.reference.groups import GlobalBatch, Group, Grouping
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.setting import Setting
from meshwright.train.step.loss_scale import LossScale


class RoundedReference(Reference):
    """`compute` may be called several times for a batch; `fits` then tells whether fp16 could hold its gradients, and
    `parts`, where they travel in a shorter type, the root of the sum of their ranks' mean squares."""

    def __init__(self, setting: Setting, question: Question, kind: Grouping, device: torch.device) -> None:
        super().__init__(setting, question, kind, device)
        if self._plan.compute.layout == "channels_last":  # whose kernels sum in another order
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._plan.numerics.precision == "fp8":
            eight_bits(self.model, device)
        self._travels = travelling_dtype(self._plan) is not None
        self._before: dict[str, Tensor] = {}
        self.parts: dict[str, float] = {}
        self.nearer = 1.0  # on the loss scale, for whoever asks what a nearly equal one would do
        self._scale = LossScale(device, 1) if self._plan.numerics.precision == "fp16" else None

    def compute(self, batch: GlobalBatch) -> Tensor:
        ranks = self._plan.data_ranks
        scale = self._scale.value * self.nearer if self._scale else 1.0
        expected = self._expected(batch)
        self._factor = ranks * scale / expected
        self._before, self.parts = {}, {}
        with arithmetic(self._plan, self.device.type):
            loss_sum, count = self._sums(batch)
        total = self._divisor(count)
        back = expected / (ranks * scale * total)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(back.to(parameter.grad.dtype))
        self.parts = {name: math.sqrt(squares) * float(back) for name, squares in self.parts.items()}
        return loss_sum / total

    def settle(self, fitted: bool) -> None:
        """Behind a step: the next one's factor, after one that fp16 could hold or not."""
        self.nearer = 1.0
        if self._scale:
            self._scale.follow(fitted)

    @property
    def fits(self) -> bool:
        return all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)

    def _added(self, group: Group) -> None:
        """Of every rank's part of a gradient: they are rounded before they are added, and may cancel then."""
        if not self._travels:
            return
        for name, gradient in self.gradients().items():
            part = gradient - self._before.get(name, torch.zeros_like(gradient))
            self.parts[name] = self.parts.get(name, 0.0) + float(part.double().square().mean())
            self._before[name] = gradient

    def _expected(self, batch: GlobalBatch) -> Tensor:
        """The count that a session divides by, known before the forward pass."""
        if self._loss.kind == "sum":
            return torch.ones_like(self._zero)
        counts = [self._loss.count(self._example(group).target, group.samples) for group in batch.groups]
        return self._divisor(torch.stack([torch.as_tensor(count).double() for count in counts]).sum().to(self._zero))

    def _forward(self, example: Example) -> Any:
        narrow = gathered_dtype(self._plan)
        with forward_precision(self._plan, self.device.type):
            if narrow is None:
                return super()._forward(example)
            weights = {name: parameter.to(narrow) for name, parameter in self.model.named_parameters()}
            return functional_call(self.model, weights, example.arguments, example.keywords)

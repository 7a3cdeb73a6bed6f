"""The reference in a plan's own precision: one device that rounds where the plan rounds.

Every microbatch of every data rank goes through the model by itself, as under the plan, in the same precision and with
the same loss scale. What still differs is the order of sums, and the partial sums that the tensor axis rounds.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from meshwright.blocks.convolutions import use_nnpack
from meshwright.model_io.batch import ModelBatch
from meshwright.parallel.float8 import convert_linears_to_float8
from meshwright.parallel.precision import (
    forward_precision,
    fp32_product_precision,
    gathered_weight_dtype,
    gradient_reduce_dtype,
    register_casts,
)
from meshwright.proof.reference.groups import GlobalBatch, Grouping, SampleGroup
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.reference_setup import ReferenceSetup
from meshwright.proof.request import ProofRequest
from meshwright.train.step.loss_scale import LossScale


class RoundedReference(Reference):
    """A reference that rounds as the plan does. `compute` may be called several times for one batch.

    `part_sizes` is filled if the plan all-reduces gradients in a type shorter than fp32. For each gradient, it is √(Σ
    m), where m is the mean square of what one group of samples contributes to the gradient. `loss_scale_factor`
    multiplies the loss scale of fp16. It serves to see whether a slightly different loss scale would still overflow.
    """

    def __init__(self, setup: ReferenceSetup, request: ProofRequest, grouping: Grouping, device: torch.device) -> None:
        super().__init__(setup, request, grouping, device)
        if self._plan.compute.layout == "channels_last":  # its kernels sum in another order
            self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self._plan.compute.convolutions == "nnpack":
            use_nnpack(self.model)
        if self._plan.numerics.precision == "fp8":
            convert_linears_to_float8(self.model, device)
        register_casts(self._plan, self)
        self._rounds_all_reduce = gradient_reduce_dtype(self._plan) is not None
        self._accumulated: dict[str, Tensor] = {}  # the gradients after the last group
        self.part_sizes: dict[str, float] = {}
        self.loss_scale_factor = 1.0
        self._scale = LossScale(device, 1) if self._plan.numerics.precision == "fp16" else None

    def compute(self, batch: GlobalBatch) -> Tensor:
        ranks = self._plan.data_ranks
        scale = self._scale.value * self.loss_scale_factor if self._scale else 1.0
        expected_count = self._expected_count(batch)
        self._backward_factor = ranks * scale / expected_count
        self._accumulated, self.part_sizes = {}, {}
        with fp32_product_precision(self._plan, self.device.type):
            loss_sum, count = self._accumulate(batch)
        divisor = self._divisor(count)
        unscale = expected_count / (ranks * scale * divisor)
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(unscale.to(parameter.grad.dtype))
        self.part_sizes = {name: math.sqrt(squares) * float(unscale) for name, squares in self.part_sizes.items()}
        return loss_sum / divisor

    def update_loss_scale(self, gradients_were_finite: bool) -> None:
        """Sets the loss scale for the next step, as a session does after each step."""
        self.loss_scale_factor = 1.0
        if self._scale:
            self._scale.update(gradients_were_finite)

    @property
    def gradients_are_finite(self) -> bool:
        """Whether all gradients that `compute` left in the model are finite. If not, fp16 has overflowed."""
        return all(bool(p.grad.isfinite().all()) for p in self.model.parameters() if p.grad is not None)

    def _after_group(self, group: SampleGroup) -> None:
        """Measures what this group contributed to each gradient. The size of the sum would not do, because
        contributions are rounded before they are added, and may then cancel."""
        if not self._rounds_all_reduce:
            return
        for name, gradient in self.gradients().items():
            part = gradient - self._accumulated.get(name, torch.zeros_like(gradient))
            self.part_sizes[name] = self.part_sizes.get(name, 0.0) + float(part.double().square().mean())
            self._accumulated[name] = gradient

    def _expected_count(self, batch: GlobalBatch) -> Tensor:
        """Returns what a session divides the sum of the loss by (the number of samples or valid targets), as far as it
        is known before the forward pass."""
        if self._loss.kind == "sum":
            return torch.ones_like(self._zero)
        counts = [self._loss.count(self._model_batch(group).target, group.samples) for group in batch.groups]
        return self._divisor(torch.stack([torch.as_tensor(count).double() for count in counts]).sum().to(self._zero))

    def _forward(self, model_batch: ModelBatch) -> Any:
        weight_dtype = gathered_weight_dtype(self._plan)
        with forward_precision(self._plan, self.device.type):
            if weight_dtype is None:
                return super()._forward(model_batch)
            weights = {name: parameter.to(weight_dtype) for name, parameter in self.model.named_parameters()}
            return functional_call(self.model, weights, model_batch.arguments, model_batch.keywords)

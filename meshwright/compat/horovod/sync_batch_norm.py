"""`SyncBatchNorm`: batch normalization with the mean and variance of the batches of all ranks. Unlike Horovod's, it
also works on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from meshwright.compat.horovod.basics import size
from meshwright.compat.horovod.operations.allreduce import allreduce_async
from meshwright.compat.horovod.operations.start import Sum, synchronize


class SyncBatchNorm(_BatchNorm):
    """Normalizes over the batches of all ranks, which may have different sizes. Its running variance is the unbiased
    one of the joined batch."""

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: Tensor) -> Tensor:
        self._check_input_dim(input)
        uses_batch = self.training or not self.track_running_stats
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:
            count = self.num_batches_tracked
            momentum = 1.0 / float(count) if self.training and count is not None else 0.0
        if not uses_batch or size() == 1:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, uses_batch, momentum, self.eps
            )
        normalized, mean, variance, count = _Normalize.apply(input, self.eps)
        if self.training and self.track_running_stats and self.running_mean is not None:
            assert self.running_var is not None
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        shape = (1, -1, *(1,) * (input.dim() - 2))
        if self.weight is not None:
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized


class _Normalize(torch.autograd.Function):
    """Subtracts the mean and divides by the standard deviation of all ranks' batches. In the backward pass, the
    gradient of the input needs two more sums over the ranks."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        local_count = input.numel() // max(1, input.shape[1])
        sums = torch.cat([wide.sum(dims), wide.new_tensor([local_count])])
        sums = synchronize(allreduce_async(sums, op=Sum, name="sync_batch_norm.mean"))
        count = sums[-1]
        mean = sums[:-1] / count
        shape = (1, -1, *(1,) * (input.dim() - 2))
        centered = wide - mean.view(shape)
        squares = allreduce_async((centered * centered).sum(dims), op=Sum, name="sync_batch_norm.variance")
        variance = synchronize(squares) / count
        inverse = torch.rsqrt(variance + eps)
        normalized = centered * inverse.view(shape)
        ctx.save_for_backward(normalized, inverse, count)
        ctx.dims, ctx.shape = dims, shape
        ctx.mark_non_differentiable(mean, variance, count)
        return normalized.to(input.dtype), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        normalized, inverse, count = ctx.saved_tensors
        gradient = gradients[0].to(normalized.dtype)
        sums = torch.stack([gradient.sum(ctx.dims), (gradient * normalized).sum(ctx.dims)])
        sums = synchronize(allreduce_async(sums, op=Sum, name="sync_batch_norm.gradient")) / count
        mean, projection = (value.view(ctx.shape) for value in sums)
        result = (gradient - mean - normalized * projection) * inverse.view(ctx.shape)
        return result.to(gradients[0].dtype), None

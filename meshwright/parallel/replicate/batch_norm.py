"""Synchronized BatchNorm on CPUs and GPUs: in training, the statistics are those of the samples of all data ranks.

Rank r has n_r values per channel with mean m_r, and q_r is the sum of their squared distances from it; N = Σ n_r:

    mean = Σ n_r m_r / N        var = (Σ q_r + Σ n_r (m_r - mean)²) / N                    _statistics()
    dx   = w / σ · (dy - Σdy / N - x̂ · Σ(dy x̂) / N),  both sums over all ranks              _Normalize.backward()

Ranks may have different numbers of samples. Each sample counts the same. This includes a sample that a rank without
samples of a short batch borrows from another rank, and that has no weight in the loss. Statistics are combined over
ranks, not over microbatches.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.batch import at_least_fp32

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Makes every BatchNorm in `module` normalize over the batches of all ranks of the group while it trains. Classes
    and names of modules stay. All ranks must run the same layers in the same order."""
    for layer in module.modules():
        if isinstance(layer, _KINDS):
            layer.forward = _SynchronizedForward(layer, group)  # type: ignore[method-assign]


class _SynchronizedForward:
    """Replaces the forward pass of a BatchNorm layer; in evaluation it calls the original one."""

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self._layer: Any = layer
        self._group = group
        self._original_forward = layer.forward

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if not layer.training:
            out: Tensor = self._original_forward(input)
            return out
        layer._check_input_dim(input)
        mean, var, count = _statistics(input.detach(), self._group)
        if layer.track_running_stats and layer.running_mean is not None:
            _update_running_statistics(layer, mean, var, count)
        normalized: Tensor = _Normalize.apply(input, layer.weight, layer.bias, mean, var, count, layer.eps, self._group)
        return normalized


def _statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of the values per channel over all ranks, with one all-gather."""
    input_fp32 = at_least_fp32(input)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // max(1, input.shape[1])
    local = input_fp32.new_zeros(2, input.shape[1])  # means and sums of squared distances
    if count:
        var, mean = torch.var_mean(input_fp32, dims, correction=0)
        local = torch.stack([mean, var * count])
    sent = torch.cat([local.flatten(), local.new_full((1,), count)])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    of_ranks = torch.stack(received)
    counts = of_ranks[:, -1:]
    means, squared_distances = of_ranks[:, :-1].unflatten(1, (2, -1)).unbind(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = (squared_distances + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


@torch.no_grad()
def _update_running_statistics(layer: Any, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """Updates the running mean and variance as BatchNorm does, with the unbiased variance of all ranks' values."""
    weight = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # running statistics are the mean over all batches so far
            weight = 1.0 / float(layer.num_batches_tracked)
    weight = 0.0 if weight is None else weight
    unbiased = var * (count / (count - 1).clamp(min=1))
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), weight)
    layer.running_var.lerp_(unbiased.to(layer.running_var.dtype), weight)


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
        group: dist.ProcessGroup,
    ) -> Tensor:
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.group = group
        ctx.has_bias = bias is not None
        # The mean is subtracted first: folded into the bias, a large mean would lose the rest in its rounding.
        out = (input - _per_channel(mean, input)).mul_(_per_channel(scale if weight is None else scale * weight, input))
        return (out if bias is None else out.add_(_per_channel(bias, input))).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        dims = [dim for dim in range(input.dim()) if dim != 1]
        grad_fp32 = at_least_fp32(grad)
        normalized = (at_least_fp32(input) - _per_channel(mean, input)) * _per_channel(scale, input)
        grad_sum = grad_fp32.sum(dims)
        product_sum = (grad_fp32 * normalized).sum(dims)
        weight_grad = product_sum.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        bias_grad = grad_sum.to(grad.dtype if weight is None else weight.dtype) if ctx.has_bias else None
        input_grad = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_sum, product_sum])
            dist.all_reduce(sums, group=ctx.group)
            means = sums / count
            factor = scale if weight is None else scale * weight
            input_grad = grad_fp32 - _per_channel(means[0], input) - normalized * _per_channel(means[1], input)
            input_grad = (input_grad * _per_channel(factor, input)).to(input.dtype)
        return input_grad, weight_grad, bias_grad, None, None, None, None, None


def _per_channel(channels: Tensor, like: Tensor) -> Tensor:
    """One number per channel, in a shape that broadcasts over a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))

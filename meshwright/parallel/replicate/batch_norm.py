"""Synchronized BatchNorm, on CPUs and GPUs: in training, statistics are those of all data ranks' samples together.

For rank r with n_r values per channel, their mean m_r and their squared distances q_r from it, N = Σ n_r:

    mean = Σ n_r m_r / N        var = (Σ q_r + Σ n_r (m_r - mean)²) / N                    _statistics()
    dx   = w / σ · (dy - Σdy / N - x̂ · Σ(dy x̂) / N),  both sums over all ranks              _Normalize.backward()

Ranks may have different numbers of samples. Each sample counts the same, also one that a rank borrowed to fill a short
batch and that has no weight in the loss. It joins ranks, not microbatches.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.batch import at_least_fp32

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norm(module: nn.Module, group: dist.ProcessGroup) -> None:
    """From now on every BatchNorm in `module` normalizes over the batches of all ranks of the group, while it trains;
    classes and names stay. All ranks run the same layers in the same order."""
    for layer in module.modules():
        if isinstance(layer, _KINDS):
            layer.forward = _Forward(layer, group)  # type: ignore[method-assign]


class _Forward:
    """In place of a layer's own forward pass."""

    def __init__(self, layer: nn.Module, group: dist.ProcessGroup) -> None:
        self._layer: Any = layer
        self._group = group
        self._alone = layer.forward

    def __call__(self, input: Tensor) -> Tensor:
        layer = self._layer
        if not layer.training:
            out: Tensor = self._alone(input)
            return out
        layer._check_input_dim(input)
        mean, var, count = _statistics(input.detach(), self._group)
        if layer.track_running_stats and layer.running_mean is not None:
            _remember(layer, mean, var, count)
        normal: Tensor = _Normalize.apply(input, layer.weight, layer.bias, mean, var, count, layer.eps, self._group)
        return normal


def _statistics(input: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of the values per channel over all ranks, with one exchange."""
    wide = at_least_fp32(input)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // max(1, input.shape[1])
    mine = wide.new_zeros(2, input.shape[1])
    if count:
        var, mean = torch.var_mean(wide, dims, correction=0)
        mine = torch.stack([mean, var * count])
    sent = torch.cat([mine.flatten(), mine.new_full((1,), count)])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    together = torch.stack(received)
    counts = together[:, -1:]
    means, distances = together[:, :-1].unflatten(1, (2, -1)).unbind(1)
    total = counts.sum()
    mean = (means * counts).sum(0) / total
    var = (distances + counts * (means - mean).square()).sum(0) / total
    return mean, var, total


@torch.no_grad()
def _remember(layer: Any, mean: Tensor, var: Tensor, count: Tensor) -> None:
    """As BatchNorm does, with the unbiased variance of all ranks' values."""
    weight = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if layer.momentum is None:  # a mean over all batches so far
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
        ctx.biased = bias is not None
        # The mean is taken off first: beside a large one, what is left would drown in its rounding.
        out = (input - _wide(mean, input)).mul_(_wide(scale if weight is None else scale * weight, input))
        return (out if bias is None else out.add_(_wide(bias, input))).to(input.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, weight, mean, scale, count = ctx.saved_tensors
        dims = [dim for dim in range(input.dim()) if dim != 1]
        grad_wide = at_least_fp32(grad)
        normal = (at_least_fp32(input) - _wide(mean, input)) * _wide(scale, input)
        grad_sum = grad_wide.sum(dims)
        product_sum = (grad_wide * normal).sum(dims)
        of_weight = product_sum.to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = grad_sum.to(grad.dtype if weight is None else weight.dtype) if ctx.biased else None
        of_input = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([grad_sum, product_sum])
            dist.all_reduce(sums, group=ctx.group)
            means = sums / count
            factor = scale if weight is None else scale * weight
            of_input = grad_wide - _wide(means[0], input) - normal * _wide(means[1], input)
            of_input = (of_input * _wide(factor, input)).to(input.dtype)
        return of_input, of_weight, of_bias, None, None, None, None, None


def _wide(channels: Tensor, like: Tensor) -> Tensor:
    """One number per channel, to go with a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))

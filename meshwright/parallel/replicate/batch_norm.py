"""Synchronized BatchNorm on CPUs and GPUs: in training, the statistics are those of the samples of all data ranks.

Rank r has n_r values per channel with mean m_r, and q_r is the sum of their squared distances from it; N = Σ n_r:

    mean = Σ n_r m_r / N        var = (Σ q_r + Σ n_r (m_r - mean)²) / N                    _statistics()
    dx   = w / σ · (dy - Σdy / N - x̂ · Σ(dy x̂) / N),  both sums over all ranks              _Normalize.backward()

Ranks may have different numbers of samples. Each sample counts the same. A sample that a rank without samples of a
short batch borrows from another rank (blocks/borrowed_samples.py) does not count: n_r is 0, the sample is normalized
with the statistics of the others, and its dx is w / σ · dy. Where all samples are borrowed, as where a pipeline repeats
a microbatch, each rank normalizes by itself, and running statistics stay. Statistics are combined over ranks, not over
microbatches.

`nn.SyncBatchNorm` of torch is for GPUs only, and takes its statistics over all ranks of the process group, also over
those that have the same samples or other layers. Under a plan it is normalized here, too, over the data ranks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.blocks.borrowed_samples import counts_samples_itself, is_borrowed
from meshwright.model_io.batch import at_least_fp32
from meshwright.parallel.torch_private import AnyBatchNorm

_KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def synchronize_batch_norm(
    module: nn.Module, group: dist.ProcessGroup, kinds: tuple[type[nn.Module], ...] = (*_KINDS, nn.SyncBatchNorm)
) -> None:
    """Makes every BatchNorm in `module` normalize over the batches of all ranks of the group while it trains. Classes
    and names of modules stay. All ranks must run the same layers in the same order. `kinds` are the classes of the
    layers that are changed. An `nn.SyncBatchNorm` with a process group of its own keeps that group."""
    for layer in module.modules():
        if isinstance(layer, kinds):
            of_layer = getattr(layer, "process_group", None)
            layer.forward = _SynchronizedForward(layer, of_layer or group)
            counts_samples_itself(layer)


@contextmanager
def hide_sync_batch_norm(module: nn.Module) -> Iterator[None]:
    """Within this context, layers of `nn.SyncBatchNorm` are instances of its base class. DDP refuses models on CPUs
    that have such layers when it is made; it does not look for them later."""
    layers = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    classes = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = AnyBatchNorm  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer, kind in zip(layers, classes, strict=True):
            layer.__class__ = kind


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
        borrowed = is_borrowed(layer)
        mean, var, count = _statistics(input.detach(), self._group, borrowed)
        if borrowed and not count:
            mean, var, _ = _local_statistics(input.detach())
        elif layer.track_running_stats and layer.running_mean is not None:
            _update_running_statistics(layer, mean, var, count)
        normalized: Tensor = _Normalize.apply(
            input, layer.weight, layer.bias, mean, var, count, layer.eps, self._group, borrowed
        )
        return normalized


def _local_statistics(input: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean, variance and number of this rank's values per channel; zeros if it has none."""
    input_fp32 = at_least_fp32(input)
    dims = [dim for dim in range(input.dim()) if dim != 1]
    count = input.numel() // max(1, input.shape[1])
    if not count:
        zeros = input_fp32.new_zeros(input.shape[1])
        return zeros, zeros, 0
    var, mean = torch.var_mean(input_fp32, dims, correction=0)
    return mean, var, count


def _statistics(input: Tensor, group: dist.ProcessGroup, borrowed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, variance and number of the values per channel over all ranks, with one all-gather. The values of this rank
    do not count if they are `borrowed`."""
    mean, var, count = _local_statistics(input[:0] if borrowed else input)
    local = torch.stack([mean, var * count])  # means and sums of squared distances
    sent = torch.cat([local.flatten(), local.new_full((1,), count)])
    received = [torch.empty_like(sent) for _ in range(group.size())]
    dist.all_gather(received, sent, group=group)
    of_ranks = torch.stack(received)
    counts = of_ranks[:, -1:]
    means, squared_distances = of_ranks[:, :-1].unflatten(1, (2, -1)).unbind(1)
    total = counts.sum()
    divisor = total.clamp(min=1)
    mean = (means * counts).sum(0) / divisor
    var = (squared_distances + counts * (means - mean).square()).sum(0) / divisor
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
        borrowed: bool,
    ) -> Tensor:
        scale = torch.rsqrt(var + eps)
        ctx.save_for_backward(input, weight, mean, scale, count)
        ctx.group, ctx.borrowed = group, borrowed
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
            factor = scale if weight is None else scale * weight
            input_grad = grad_fp32
            if not ctx.borrowed:  # otherwise the statistics do not depend on this rank's values
                means = sums / count
                input_grad = grad_fp32 - _per_channel(means[0], input) - normalized * _per_channel(means[1], input)
            input_grad = (input_grad * _per_channel(factor, input)).to(input.dtype)
        return input_grad, weight_grad, bias_grad, None, None, None, None, None, None


def _per_channel(channels: Tensor, like: Tensor) -> Tensor:
    """One number per channel, in a shape that broadcasts over a batch."""
    return channels.view(1, -1, *[1] * (like.dim() - 2))

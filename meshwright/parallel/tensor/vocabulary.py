"""The vocabulary split over ranks: each rank looks up the rows of the embedding table that it holds, and the loss is
computed from logits that are never gathered.

With z the logits of one target, m their maximum and t the logit of the target's class, the loss is

    log Σ exp(z - m) + m - t        maximum, sum and target logit: all-reduces of a few numbers for each target

Its gradient is softmax(z) - onehot, which every rank computes for the logits that it holds (`_ShardedCrossEntropy`).
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.differentiable_collectives import (
    AxisGroup,
    all_gather_tensor,
    all_reduce,
    all_reduce_tensor,
    consecutive_ranges,
    reduce_scatter,
)
from meshwright.parallel.tensor.products import count_samples_by_rank, sequence_spec
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.torch_private import assert_async, cross_entropy_function
from meshwright.profile.structure.split_rules import CannotSplit

_MEAN, _SUM = 1, 2  # torch's numbers of the reductions


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if not isinstance(weight, ShardView) or isinstance(indices, ShardView) or weight.spec.shard.dim != 0:
        return NotImplemented
    if scale_grad_by_freq or sparse:
        raise CannotSplit("its gradient is sparse or scaled by how often a row is looked up")
    spec, local, rows = weight.spec, weight.local_tensor, weight.shape[0]
    group, samples = spec.group, None
    if group.axis == "replicate":  # each rank looks up the samples of all ranks in the rows that it holds
        if not indices.dim():
            raise CannotSplit("it looks up one row, and not one for each sample")
        samples = consecutive_ranges(0, count_samples_by_rank(indices, group))
        indices = all_gather_tensor(indices, samples, group)
    ((first, local_rows),) = spec.ranges.by_rank[group.rank]
    assert_async(((indices >= 0) & (indices < rows)).all(), f"an index lies outside of a table of {rows} rows")
    on_other_ranks = (indices < first) | (indices >= first + local_rows)
    local_padding = padding_idx - first if first <= padding_idx < first + local_rows else -1
    if local_rows:
        partial = torch.embedding(local, (indices - first).masked_fill(on_other_ranks, 0), local_padding)
        partial = partial.masked_fill(on_other_ranks.unsqueeze(-1), 0)
    else:  # more ranks than rows
        partial = local.sum() + local.new_zeros((*indices.shape, weight.shape[1]))
    if samples is not None:
        return reduce_scatter(partial, samples, group)
    if group.sequence_parallel and partial.dim() > 2:
        sequence = sequence_spec(partial, group)
        return ShardView(reduce_scatter(partial, sequence.ranges, group), sequence, tuple(partial.shape))
    return all_reduce(partial, group)


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(logits, ShardView) or isinstance(target, ShardView) or isinstance(weight, ShardView):
        return NotImplemented
    class_dim = 0 if logits.dim() == 1 else 1
    spec, shard = logits.spec, logits.spec.shard
    is_split_by_class = shard.dim == class_dim and shard.outer == 1 and spec.kind == "vocabulary"
    if not is_split_by_class or target.is_floating_point() or weight is not None or spec.samples_by_rank:
        raise CannotSplit("its classes are weighted, or split otherwise than by vocabulary")
    ((first, _),) = spec.ranges.by_rank[spec.group.rank]
    local = logits.local_tensor.movedim(class_dim, -1)
    rows, classes = local.reshape(-1, local.shape[-1]), target.reshape(-1)
    is_valid = classes != ignore_index
    losses = _ShardedCrossEntropy.apply(
        rows, classes, is_valid, spec.group, first, shard.count * shard.inner, label_smoothing
    )
    if reduction == _SUM:
        return losses.sum()
    if reduction == _MEAN:
        return losses.sum() / is_valid.sum()
    return losses.reshape(target.shape)


class _ShardedCrossEntropy(torch.autograd.Function):
    """The loss of each target, and 0 where the target is ignored. `first_class` is the first class of this rank's
    logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        classes: Tensor,
        is_valid: Tensor,
        group: AxisGroup,
        first_class: int,
        class_count: int,
        smoothing: float,
    ) -> Tensor:
        wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
        local_count = wide.shape[1]
        largest = wide.max(dim=1).values.clone() if local_count else wide.new_full((wide.shape[0],), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group.process_group)
        is_local = is_valid & (classes >= first_class) & (classes < first_class + local_count)
        local_class = torch.where(is_local, classes - first_class, 0)
        powers = (wide - largest.unsqueeze(1)).exp()
        picked = wide.gather(1, local_class.unsqueeze(1)).squeeze(1) if local_count else largest
        sums = torch.stack([powers.sum(1), torch.where(is_local, picked, 0), wide.sum(1)])
        power_sum, target_logit, logit_sum = all_reduce_tensor(sums, group)
        log_sum = power_sum.log() + largest
        losses = (1 - smoothing) * (log_sum - target_logit) + smoothing * (log_sum - logit_sum / class_count)
        ctx.save_for_backward(powers.div_(power_sum.unsqueeze(1)), local_class, is_local, is_valid)
        ctx.smoothing, ctx.class_count, ctx.dtype = smoothing, class_count, logits.dtype
        return torch.where(is_valid, losses, 0).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, local_class, is_local, is_valid = ctx.saved_tensors
        gradient = softmax - ctx.smoothing / ctx.class_count
        if gradient.shape[1]:
            at_target = is_local.to(gradient.dtype) * (ctx.smoothing - 1)
            gradient.scatter_add_(1, local_class.unsqueeze(1), at_target.unsqueeze(1))
        gradient *= torch.where(is_valid, grads[0], 0).to(gradient.dtype).unsqueeze(1)
        return gradient.to(ctx.dtype), None, None, None, None, None, None


VOCABULARY: dict[Any, Callable[..., Any]] = {
    torch.embedding: embedding,
    cross_entropy_function: cross_entropy,
}

"""The vocabulary divided among ranks: rows of a table are looked up where they are held, and scores are compared
without being brought together.

With z the scores of one target, m their maximum and t the target's own score, the loss is

    log Σ exp(z − m) + m − t        max, sum and target's score: three all-reduces of one number a target

whose gradient, softmax(z) − onehot, every rank computes for the scores it holds.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.exchange import Team, all_sum, sum_out, sum_scatter
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView
from meshwright.profile.structure.split_rules import Refused, Shard

_MEAN, _SUM = 1, 2  # torch's numbers of reductions


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    if not isinstance(weight, ShardView) or isinstance(indices, ShardView) or weight.mark.shard.dim != 0:
        return NotImplemented
    if scale_grad_by_freq or sparse:
        raise Refused("its gradient is sparse or scaled by how often a row is looked up")
    mark, local, rows = weight.mark, weight.local, weight.shape[0]
    ((first, held),) = mark.division.places[mark.team.rank]
    torch._assert_async(((indices >= 0) & (indices < rows)).all(), f"an index lies outside of a table of {rows} rows")
    elsewhere = (indices < first) | (indices >= first + held)
    own_padding = padding_idx - first if first <= padding_idx < first + held else -1
    if held:
        found = torch.embedding(local, (indices - first).masked_fill(elsewhere, 0), own_padding)
        found = found.masked_fill(elsewhere.unsqueeze(-1), 0)
    else:  # more ranks than rows
        found = local.sum() + local.new_zeros((*indices.shape, weight.shape[1]))
    team = mark.team
    if team.sequence and found.dim() > 2:
        along = ShardSpec(Shard(1, 1, found.shape[1], 1), team, "sequence")
        return ShardView(sum_scatter(found, along.division, team), along, tuple(found.shape))
    return sum_out(found, team)


def cross_entropy(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    if not isinstance(scores, ShardView) or isinstance(target, ShardView) or isinstance(weight, ShardView):
        return NotImplemented
    classes = 0 if scores.dim() == 1 else 1
    shard = scores.mark.shard
    fits = shard.dim == classes and shard.outer == 1 and scores.mark.kind == "vocabulary"
    if not fits or target.is_floating_point() or weight is not None or scores.mark.samples:
        raise Refused("its classes are weighted, or divided otherwise than by vocabulary")
    mark = scores.mark
    ((first, _),) = mark.division.places[mark.team.rank]
    local = scores.local.movedim(classes, -1)
    rows, goals = local.reshape(-1, local.shape[-1]), target.reshape(-1)
    valid = goals != ignore_index
    losses = _Losses.apply(rows, goals, valid, mark.team, first, shard.count * shard.inner, label_smoothing)
    if reduction == _SUM:
        return losses.sum()
    if reduction == _MEAN:
        return losses.sum() / valid.sum()
    return losses.reshape(target.shape)


class _Losses(torch.autograd.Function):
    """Each target's loss; 0 where it is ignored."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, goals: Tensor, valid: Tensor, team: Team, first: int, classes: int, smoothing: float
    ) -> Tensor:
        wide = rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows
        held = wide.shape[1]
        largest = wide.max(dim=1).values.clone() if held else wide.new_full((wide.shape[0],), -torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=team.group)
        here = valid & (goals >= first) & (goals < first + held)
        place = torch.where(here, goals - first, 0)
        powers = (wide - largest.unsqueeze(1)).exp()
        own = wide.gather(1, place.unsqueeze(1)).squeeze(1) if held else largest
        sums = torch.stack([powers.sum(1), torch.where(here, own, 0), wide.sum(1)])
        total, hit, level = all_sum(sums, team)
        high = total.log() + largest
        losses = (1 - smoothing) * (high - hit) + smoothing * (high - level / classes)
        ctx.save_for_backward(powers.div_(total.unsqueeze(1)), place, here, valid)
        ctx.smoothing, ctx.classes, ctx.dtype = smoothing, classes, rows.dtype
        return torch.where(valid, losses, 0).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        softmax, place, here, valid = ctx.saved_tensors
        gradient = softmax - ctx.smoothing / ctx.classes
        if gradient.shape[1]:
            hits = here.to(gradient.dtype) * (ctx.smoothing - 1)
            gradient.scatter_add_(1, place.unsqueeze(1), hits.unsqueeze(1))
        gradient *= torch.where(valid, grads[0], 0).to(gradient.dtype).unsqueeze(1)
        return gradient.to(ctx.dtype), None, None, None, None, None, None


VOCABULARY: dict[Any, Callable[..., Any]] = {
    torch.embedding: embedding,
    torch._C._nn.cross_entropy_loss: cross_entropy,
}

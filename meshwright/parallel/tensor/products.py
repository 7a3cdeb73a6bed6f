"""Matrix products with parts: columns of a weight make parts of features, rows sum them up; and attention by heads.

    x (whole) · W[:, part]       = y[:, part]       column: nothing crosses; the gradient of x is summed
    x[:, part] · W[part, :]      = a partial sum    row: all-reduce; along the sequence: reduce-scatter
    x[rows] · W (whole)          = y[rows]          the gradient of W is summed

Over the replicate axis x holds each rank's own samples: they are gathered first, and go back to their ranks behind.
"""

from collections.abc import Callable
from dataclasses import replace
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.exchange import Team, copy_in, even, gather_in, scatter, sum_out, sum_scatter, swap
from meshwright.parallel.tensor.randomness import own_chance
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, whole, whole_in
from meshwright.profile.structure.split_rules import Refused, Shard

_ENTERED = "_meshwright_entered"


def entered(x: Tensor, team: Team) -> Tensor:
    """A whole tensor on its way into divided work: layers that share it sum its gradient once."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if x.is_leaf:  # a parameter outlives the pass
        return copy_in(x, team)
    known = getattr(x, _ENTERED, None)
    if known is None or known[:2] != (x._version, team):
        known = (x._version, team, copy_in(x, team))
        setattr(x, _ENTERED, known)
    result: Tensor = known[2]
    return result


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if isinstance(weight, ShardView):
        if weight.dim() != 2:
            return NotImplemented
        if weight.mark.shard.dim == 0:
            own = bias if bias is None else _cut(bias, weight)
            return _column(x, weight, 0, lambda inner: torch.nn.functional.linear(inner, weight.local, own))
        return _row(x, weight, 1, lambda inner: torch.nn.functional.linear(inner, weight.local), bias)
    if isinstance(x, ShardView) and x.mark.shard.dim < x.dim() - 1 and not isinstance(bias, ShardView):
        # A whole weight on parts that are divided along another dimension than the one it sums over.
        team = x.mark.team
        added = bias if bias is None else entered(bias, team)
        made = torch.nn.functional.linear(x.local, entered(weight, team), added)
        return ShardView(made, x.mark, (*x.shape[:-1], made.shape[-1]))
    return NotImplemented


def matmul(x: Tensor, weight: Tensor) -> Any:
    if not isinstance(weight, ShardView) or weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    if weight.mark.shard.dim == 1:
        return _column(x, weight, 1, lambda inner: torch.matmul(inner, weight.local))
    return _row(x, weight, 0, lambda inner: torch.matmul(inner, weight.local), None)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if not isinstance(weight, ShardView):
        if isinstance(x, ShardView) and x.mark.shard.dim == 0 and bias.dim() == 1 and not isinstance(bias, ShardView):
            team = x.mark.team
            made = torch.addmm(entered(bias, team), x.local, entered(weight, team), beta=beta, alpha=alpha)
            return ShardView(made, x.mark, (x.shape[0], made.shape[-1]))
        return NotImplemented
    if bias.dim() != 1:
        return NotImplemented
    if weight.mark.shard.dim == 1:
        return _column(
            x,
            weight,
            1,
            lambda inner: torch.addmm(_cut(bias, weight), inner, weight.local, beta=beta, alpha=alpha),
        )
    return _row(x, weight, 0, lambda inner: torch.mm(inner, weight.local) * alpha, bias * beta if beta != 1 else bias)


def _column(x: Tensor, weight: ShardView, dim: int, product: Callable[[Tensor], Tensor]) -> ShardView:
    mark = weight.mark
    samples: tuple[int, ...] = ()
    if isinstance(x, ShardView):
        if x.mark.kind == "features":
            raise Refused("parts of features meet a layer whose outputs are divided")
        inner = whole_in(x)
    elif mark.team.axis == "replicate":
        samples = _samples(x, mark.team)
        inner = gather_in(x, even(0, samples), mark.team)
    else:
        inner = entered(x, mark.team)
    made = product(inner)
    shape = (*inner.shape[:-1], weight.shape[dim])
    shard = replace(mark.shard, dim=len(shape) - 1)
    return ShardView(made, replace(mark, shard=shard, samples=samples), shape)


def _row(x: Tensor, weight: ShardView, dim: int, product: Callable[[Tensor], Tensor], bias: Tensor | None) -> Tensor:
    mark, team = weight.mark, weight.mark.team
    wanted = replace(mark, shard=replace(mark.shard, dim=x.dim() - 1))
    samples: tuple[int, ...] = ()
    if isinstance(x, ShardView) and x.mark.kind != "features":
        x = whole(x)
    if isinstance(x, ShardView):
        shard = x.mark.shard
        if shard.dim != x.dim() - 1 or shard.outer != 1 or x.shape[-1] != weight.shape[dim]:
            raise Refused("a layer sums over a dimension that is divided otherwise")
        inner, samples = x.local, x.mark.samples
    elif team.axis == "replicate":
        samples = _samples(x, team)
        inner = swap(x, even(0, samples), wanted.division, team)
    else:
        inner = scatter(x, wanted.division, team)
    partial = product(inner)
    if samples:
        return _biased(sum_scatter(partial, even(0, samples), team), bias)
    if team.sequence and partial.dim() > 2:
        length = partial.shape[1]
        along = ShardSpec(Shard(1, 1, length, 1), team, "sequence")
        summed = sum_scatter(partial, along.division, team)
        own = bias if bias is None else entered(bias, team)
        return ShardView(_biased(summed, own), along, tuple(partial.shape))
    return _biased(sum_out(partial, team), bias)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _cut(bias: Tensor, weight: ShardView) -> Tensor:
    """A bias is divided with its layer; one that is kept whole elsewhere is cut here."""
    if isinstance(bias, ShardView):
        return bias.local
    mark = replace(weight.mark, shard=replace(weight.mark.shard, dim=0))
    return scatter(bias, mark.division, mark.team)


def _samples(x: Tensor, team: Team) -> tuple[int, ...]:
    """How many samples each rank has: a short last batch is not divided evenly."""
    own = torch.tensor([x.shape[0]], device=x.device)
    found = [torch.empty_like(own) for _ in range(team.ranks)]
    dist.all_gather(found, own, group=team.group)
    return tuple(int(count) for count in torch.cat(found).tolist())


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """Each rank has heads of its own; they know nothing of each other."""
    if not all(isinstance(tensor, ShardView) for tensor in (query, key, value)):
        return NotImplemented
    assert isinstance(query, ShardView)
    assert isinstance(key, ShardView)
    assert isinstance(value, ShardView)
    mark = query.mark
    counts = [part.mark.shard.count for part in (query, key, value)]
    count = gcd(*counts)
    for part in (query, key, value):
        shard = part.mark.shard
        if shard.dim >= part.dim() - 2 or (shard.dim, shard.outer) != (mark.shard.dim, mark.shard.outer):
            raise Refused("attention is divided otherwise than by heads")
    if count % mark.team.ranks:
        raise Refused(f"attention has {min(counts)} heads, which {mark.team.ranks} ranks do not divide")
    found = replace(mark, shard=replace(mark.shard, count=count, inner=mark.shard.count * mark.shard.inner // count))
    mask = None if attn_mask is None else _own_mask(attn_mask, found, query.dim())

    def attend() -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(
            query.local, key.local, value.local, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )

    if dropout_p > 0:
        with own_chance(mark.team.rank, query.device):
            made = attend()
    else:
        made = attend()
    return ShardView(made, found, (*query.shape[:-1], value.shape[-1]))


def _own_mask(mask: Tensor, mark: ShardSpec, rank: int) -> Tensor:
    if isinstance(mask, ShardView):
        return mask.local
    dim = mark.shard.dim + mask.dim() - rank
    if dim < 0 or mask.shape[dim] == 1:
        return entered(mask, mark.team)
    return scatter(mask, replace(mark, shard=replace(mark.shard, dim=dim)).division, mark.team)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    torch._C._nn.linear: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.mm: matmul,
    torch.Tensor.mm: matmul,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    torch._C._nn.scaled_dot_product_attention: attention,
}

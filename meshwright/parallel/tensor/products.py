"""Matrix products with split weights, and attention split by heads.

    x (replicated) · W[:, shard]     = y[:, shard]      column: no communication; the gradient of x is all-reduced
    x[:, shard] · W[shard, :]        = a partial sum    row: all-reduce; with sequence parallelism reduce-scatter
    x[rows] · W (replicated)         = y[rows]          the gradient of W is all-reduced

Over the replicate axis each rank has samples of its own: x is all-gathered before a column layer, and the partial sums
of a row layer are reduce-scattered, so that each rank gets its samples back.

`PRODUCTS` registers each function with dispatch.py. A function returns NotImplemented where it has no rule for its
arguments, and raises `CannotSplit` where they cannot be combined.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.differentiable_collectives import (
    AxisGroup,
    all_gather_for_sharded_work,
    all_reduce,
    all_reduce_gradient,
    all_to_all,
    consecutive_ranges,
    reduce_scatter,
    slice_own_shard,
)
from meshwright.parallel.tensor.randomness import call_with_rank_seed
from meshwright.parallel.tensor.shard_view import ShardSpec, ShardView, full_tensor, full_tensor_for_sharded_work
from meshwright.parallel.torch_private import attention_function, linear_function
from meshwright.profile.structure.split_rules import CannotSplit, DividedDimension

_ENTERED_COPY = "_meshwright_entered"


def enter_sharded_work(x: Tensor, group: AxisGroup) -> Tensor:
    """A replicated tensor as input of sharded work: its gradient is all-reduced, once for all layers that share it."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x
    if x.is_leaf:  # a parameter outlives the pass, so nothing may be cached on it
        return all_reduce_gradient(x, group)
    cached = getattr(x, _ENTERED_COPY, None)
    if cached is None or cached[:2] != (x._version, group):
        cached = (x._version, group, all_reduce_gradient(x, group))
        setattr(x, _ENTERED_COPY, cached)
    copy: Tensor = cached[2]
    return copy


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if isinstance(weight, ShardView):
        if weight.dim() != 2:
            return NotImplemented
        local_weight = weight.local_tensor
        if weight.spec.shard.dim == 0:  # its outputs are divided (column); otherwise its inputs (row)
            local_bias = None if bias is None else _local_bias(bias, weight)
            return _column(x, weight, 0, lambda inner: torch.nn.functional.linear(inner, local_weight, local_bias))
        return _row(x, weight, 1, lambda inner: torch.nn.functional.linear(inner, local_weight), bias)
    if isinstance(x, ShardView) and x.spec.shard.dim < x.dim() - 1 and not isinstance(bias, ShardView):
        # A replicated weight, and an input that is not sharded along the dimension that the product sums over.
        group = x.spec.group
        entered_bias = None if bias is None else enter_sharded_work(bias, group)
        product = torch.nn.functional.linear(x.local_tensor, enter_sharded_work(weight, group), entered_bias)
        return ShardView(product, x.spec, (*x.shape[:-1], product.shape[-1]))
    return NotImplemented


def matmul(x: Tensor, weight: Tensor) -> Any:
    if not isinstance(weight, ShardView) or weight.dim() != 2 or x.dim() < 2:
        return NotImplemented
    if weight.spec.shard.dim == 1:
        return _column(x, weight, 1, lambda inner: torch.matmul(inner, weight.local_tensor))
    return _row(x, weight, 0, lambda inner: torch.matmul(inner, weight.local_tensor), None)


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    if not isinstance(weight, ShardView):
        if isinstance(x, ShardView) and x.spec.shard.dim == 0 and bias.dim() == 1 and not isinstance(bias, ShardView):
            group = x.spec.group
            entered_bias, entered_weight = enter_sharded_work(bias, group), enter_sharded_work(weight, group)
            product = torch.addmm(entered_bias, x.local_tensor, entered_weight, beta=beta, alpha=alpha)
            return ShardView(product, x.spec, (x.shape[0], product.shape[-1]))
        return NotImplemented
    if bias.dim() != 1:
        return NotImplemented
    local_weight = weight.local_tensor
    if weight.spec.shard.dim == 1:
        return _column(
            x,
            weight,
            1,
            lambda inner: torch.addmm(_local_bias(bias, weight), inner, local_weight, beta=beta, alpha=alpha),
        )
    scaled_bias = bias * beta if beta != 1 else bias
    return _row(x, weight, 0, lambda inner: torch.mm(inner, local_weight) * alpha, scaled_bias)


def _column(x: Tensor, weight: ShardView, output_dim: int, product: Callable[[Tensor], Tensor]) -> ShardView:
    """A product whose output features are sharded. `output_dim` is the weight's dimension of output features."""
    spec = weight.spec
    samples_by_rank: tuple[int, ...] = ()
    if isinstance(x, ShardView):
        if x.spec.kind == "features":
            raise CannotSplit("its input features are sharded, and so are its output features")
        inner = full_tensor_for_sharded_work(x)
    elif spec.group.axis == "replicate":
        samples_by_rank = count_samples_by_rank(x, spec.group)
        inner = all_gather_for_sharded_work(x, consecutive_ranges(0, samples_by_rank), spec.group)
    else:
        inner = enter_sharded_work(x, spec.group)
    output = product(inner)
    shape = (*inner.shape[:-1], weight.shape[output_dim])
    shard = replace(spec.shard, dim=len(shape) - 1)
    return ShardView(output, replace(spec, shard=shard, samples_by_rank=samples_by_rank), shape)


def _row(
    x: Tensor, weight: ShardView, input_dim: int, product: Callable[[Tensor], Tensor], bias: Tensor | None
) -> Tensor:
    """A product that sums over sharded input features. `input_dim` is the weight's dimension of input features."""
    spec, group = weight.spec, weight.spec.group
    input_spec = replace(spec, shard=replace(spec.shard, dim=x.dim() - 1))
    samples_by_rank: tuple[int, ...] = ()
    if isinstance(x, ShardView) and x.spec.kind != "features":
        x = full_tensor(x)
    if isinstance(x, ShardView):
        shard = x.spec.shard
        if shard.dim != x.dim() - 1 or shard.outer != 1 or x.shape[-1] != weight.shape[input_dim]:
            raise CannotSplit("it sums over a dimension that its input has sharded in another way than its weight")
        inner, samples_by_rank = x.local_tensor, x.spec.samples_by_rank
    elif group.axis == "replicate":
        samples_by_rank = count_samples_by_rank(x, group)
        inner = all_to_all(x, consecutive_ranges(0, samples_by_rank), input_spec.ranges, group)
    else:
        inner = slice_own_shard(x, input_spec.ranges, group)
    partial = product(inner)
    if samples_by_rank:
        return _add_bias(reduce_scatter(partial, consecutive_ranges(0, samples_by_rank), group), bias)
    if group.sequence_parallel and partial.dim() > 2:
        sequence = sequence_spec(partial, group)
        summed = reduce_scatter(partial, sequence.ranges, group)
        entered_bias = None if bias is None else enter_sharded_work(bias, group)
        return ShardView(_add_bias(summed, entered_bias), sequence, tuple(partial.shape))
    return _add_bias(all_reduce(partial, group), bias)


def sequence_spec(x: Tensor, group: AxisGroup) -> ShardSpec:
    """The spec of a tensor (batch, sequence, …) that is sharded along its sequence."""
    return ShardSpec(DividedDimension(1, 1, x.shape[1], 1), group, "sequence")


def _add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


def _local_bias(bias: Tensor, weight: ShardView) -> Tensor:
    """A bias is split together with its layer's weight; one that is not is sliced here."""
    if isinstance(bias, ShardView):
        return bias.local_tensor
    spec = replace(weight.spec, shard=replace(weight.spec.shard, dim=0))
    return slice_own_shard(bias, spec.ranges, spec.group)


def count_samples_by_rank(x: Tensor, group: AxisGroup) -> tuple[int, ...]:
    """How many samples each rank has: a short last batch does not divide evenly."""
    count = torch.tensor([x.shape[0]], device=x.device)
    counts = [torch.empty_like(count) for _ in range(group.size)]
    dist.all_gather(counts, count, group=group.process_group)
    return tuple(int(number) for number in torch.cat(counts).tolist())


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
    """Each rank computes its own heads, without communication."""
    if not all(isinstance(tensor, ShardView) for tensor in (query, key, value)):
        return NotImplemented
    assert isinstance(query, ShardView)
    assert isinstance(key, ShardView)
    assert isinstance(value, ShardView)
    spec = _heads_spec(query, key, value)
    local_query, local_key, local_value = query.local_tensor, key.local_tensor, value.local_tensor
    mask = None if attn_mask is None else _local_mask(attn_mask, spec, query.dim())

    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=enable_gqa)
    arguments = (local_query, local_key, local_value, mask, dropout_p, is_causal)
    output = call_with_rank_seed(attend, spec.group.rank, *arguments) if dropout_p > 0 else attend(*arguments)
    return ShardView(output, spec, (*query.shape[:-1], value.shape[-1]))


def _heads_spec(query: ShardView, key: ShardView, value: ShardView) -> ShardSpec:
    """The spec of the attention's output. There may be fewer key-value heads than query heads."""
    spec = query.spec
    counts = [view.spec.shard.count for view in (query, key, value)]
    count = gcd(*counts)
    for view in (query, key, value):
        shard = view.spec.shard
        if shard.dim >= view.dim() - 2 or (shard.dim, shard.outer) != (spec.shard.dim, spec.shard.outer):
            raise CannotSplit("attention can only be split by heads")
    if count % spec.group.size:
        raise CannotSplit(f"attention has {min(counts)} heads, which {spec.group.size} ranks do not divide")
    inner = spec.shard.count * spec.shard.inner // count
    return replace(spec, shard=replace(spec.shard, count=count, inner=inner))


def _local_mask(mask: Tensor, spec: ShardSpec, query_dims: int) -> Tensor:
    if isinstance(mask, ShardView):
        return mask.local_tensor
    dim = spec.shard.dim + mask.dim() - query_dims
    if dim < 0 or mask.shape[dim] == 1:
        return enter_sharded_work(mask, spec.group)
    return slice_own_shard(mask, replace(spec, shard=replace(spec.shard, dim=dim)).ranges, spec.group)


PRODUCTS: dict[Any, Callable[..., Any]] = {
    linear_function: linear,
    torch.matmul: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.mm: matmul,
    torch.Tensor.mm: matmul,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    attention_function: attention,
}

"""Rules of their own for functions on sequence views: lookups, linear layers, attention, cross entropies and slices of
the sequence. `RULES` registers each of them with dispatch.py. A rule returns NotImplemented where it does not apply."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from meshwright.parallel.context.attention import AttentionCall, attend_over_ranks
from meshwright.parallel.context.sequence_view import (
    SequenceView,
    gather,
    local_part,
    sum_over_ranks,
    with_dim,
)
from meshwright.parallel.context.tiles import Dropout
from meshwright.parallel.differentiable_collectives import IndexRanges
from meshwright.parallel.tensor.memory.shared_memory import join_memory
from meshwright.parallel.tensor.shard_view import ShardView
from meshwright.parallel.torch_private import (
    attention_function,
    cross_entropy_function,
    linear_function,
    nll_loss_function,
)

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's numbers of the reductions
_cross_entropy: Callable[..., Tensor] = cross_entropy_function
_nll_loss: Callable[..., Tensor] = nll_loss_function


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Any:
    """Gradients that are divided by how often a row is looked up need the indices of all ranks."""
    if isinstance(weight, SequenceView) or not isinstance(indices, SequenceView) or scale_grad_by_freq:
        return NotImplemented
    rows = torch.embedding(weight, indices.local_tensor, padding_idx, scale_grad_by_freq, sparse)
    return SequenceView(rows, indices.spec, (*indices.shape, weight.shape[1]))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    """The weight's gradient is, on each rank, that of the rank's own positions."""
    if not isinstance(x, SequenceView) or isinstance(weight, SequenceView) or x.spec.shard.dim == x.dim() - 1:
        return NotImplemented
    product = torch.nn.functional.linear(x.local_tensor, weight, bias)
    return SequenceView(product, x.spec, (*x.shape[:-1], weight.shape[0]))


def addmm(bias: Tensor, x: Tensor, weight: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    is_plain = not isinstance(weight, SequenceView) and not isinstance(bias, SequenceView) and bias.dim() == 1
    if not isinstance(x, SequenceView) or not is_plain or x.spec.shard.dim != 0:
        return NotImplemented
    product = torch.addmm(bias, x.local_tensor, weight, beta=beta, alpha=alpha)
    return SequenceView(product, x.spec, (x.shape[0], weight.shape[1]))


# ---- attention


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
    """Each rank computes the output of its own queries. If keys and values are not divided, as in attention to a short
    memory, no rank needs those of another."""
    mask = gather(attn_mask) if isinstance(attn_mask, SequenceView) else attn_mask
    options: dict[str, Any] = {"dropout_p": dropout_p, "scale": scale, "enable_gqa": enable_gqa}
    if not isinstance(query, SequenceView):
        full_key, full_value = (gather(x) if isinstance(x, SequenceView) else x for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query, full_key, full_value, mask, is_causal=is_causal, **options
        )
    if query.spec.shard.dim != query.dim() - 2:  # divided by batch or heads that a reshape has joined with positions
        return NotImplemented
    is_divided = all(isinstance(x, SequenceView) and x.spec.shard.dim == x.dim() - 2 for x in (key, value))
    if not is_divided or (mask is not None and mask.requires_grad) or not _fits_tiles(query, key, value, mask):
        return _attention_to_full_keys(query, key, value, mask, is_causal, options)
    assert isinstance(key, SequenceView)
    assert isinstance(value, SequenceView)
    local = [_cast(x.local_tensor, query) for x in (query, key, value)]
    parts = [x.local_tensor if isinstance(x, ShardView) else x for x in local]
    seed = int(torch.randint(2**62, ())) if dropout_p > 0 else 0  # the same on every rank
    group = query.spec.group
    call = AttentionCall(
        query.spec.tokens[group.rank],
        key.spec.tokens,
        group,
        query.spec.exchange,
        query.shape[-1] ** -0.5 if scale is None else scale,
        is_causal,
        Dropout(dropout_p, seed + group.rank) if dropout_p > 0 else None,
    )
    output = attend_over_ranks(parts[0], parts[1], parts[2], mask, call)
    if isinstance(local[0], ShardView):
        output = ShardView(output, local[0].spec, (*local[0].shape[:-1], value.shape[-1]))
    return SequenceView(output, query.spec, (*query.shape[:-1], value.shape[-1]))


def _fits_tiles(query: SequenceView, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the attention can be computed tile by tile: its tensors have the same dimensions, and where they are
    split by heads too, the mask is the same for all heads, and each rank has whole groups of query heads."""
    if query.dim() != 4 or not query.dim() == key.dim() == value.dim():
        return False
    local = [x.local_tensor for x in (query, key, value) if isinstance(x, SequenceView)]
    split = [x for x in local if isinstance(x, ShardView)]
    if not split:
        return True
    has_heads = mask is not None and mask.dim() > 2 and mask.shape[-3] != 1
    heads = [x.local_tensor.shape[1] for x in split]
    is_by_heads = all(x.spec.shard.dim == 1 and x.spec.shard.outer == 1 for x in split)
    return len(split) == 3 and is_by_heads and not has_heads and heads[0] % heads[1] == 0 and heads[1] == heads[2]


def _cast(x: Tensor, query: Tensor) -> Tensor:
    """Under autocast, attention computes in half precision."""
    device = query.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(device))
    return x


def _attention_to_full_keys(
    query: SequenceView, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, options: dict[str, Any]
) -> Any:
    """Attention of this rank's queries to keys and values that every rank has in full. The mask may need a gradient."""
    spec = query.spec
    full_key, full_value = (gather(x) if isinstance(x, SequenceView) else x for x in (key, value))
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if mask is not None and mask.shape[-2] != 1:
        mask = local_part(mask, with_dim(spec, mask.dim() - 2))
    output = torch.nn.functional.scaled_dot_product_attention(query.local_tensor, full_key, full_value, mask, **options)
    return SequenceView(output, spec, (*query.shape[:-1], value.shape[-1]))


# ---- losses


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    def of_local(local_logits: Tensor, local_target: Tensor, reduction: int) -> Tensor:
        loss: Tensor = _cross_entropy(local_logits, local_target, weight, reduction, ignore_index, label_smoothing)
        return loss

    return _token_loss(logits, target, weight, reduction, ignore_index, of_local)


def nll_loss(
    logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100
) -> Any:
    def of_local(local_logits: Tensor, local_target: Tensor, reduction: int) -> Tensor:
        loss: Tensor = _nll_loss(local_logits, local_target, weight, reduction, ignore_index)
        return loss

    return _token_loss(logits, target, weight, reduction, ignore_index, of_local)


def _token_loss(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    of_local: Callable[[Tensor, Tensor, int], Tensor],
) -> Any:
    """A loss over tokens whose logits are divided. Targets of other positions than the logits' are gathered first, so
    that those that were shifted by a token are right also at the border between ranks."""
    class_dim = 0 if logits.dim() == 1 else 1
    if not isinstance(logits, SequenceView) or logits.spec.shard.dim == class_dim or isinstance(weight, SequenceView):
        return NotImplemented
    spec = logits.spec
    dim = spec.shard.dim if target.dim() == logits.dim() or spec.shard.dim == 0 else spec.shard.dim - 1
    target_spec = replace(spec, shard=replace(spec.shard, dim=dim))
    if isinstance(target, SequenceView) and target.spec == target_spec:
        local_target = target.local_tensor
    else:
        local_target = local_part(gather(target) if isinstance(target, SequenceView) else target, target_spec)
    if reduction == _NONE:
        losses = of_local(logits.local_tensor, local_target, _NONE)
        shape = target.shape if target.dim() < logits.dim() else (*target.shape[:1], *target.shape[2:])
        return SequenceView(losses, target_spec, tuple(shape))
    total = of_local(logits.local_tensor, local_target, _SUM)
    if reduction == _SUM:
        return sum_over_ranks(total, spec.group)
    if target.is_floating_point():
        count = total.new_tensor(logits.numel() / logits.shape[class_dim])
        return sum_over_ranks(total, spec.group) / count
    valid = local_target != ignore_index
    counted = valid.sum().to(total.dtype) if weight is None else weight[local_target[valid]].sum().to(total.dtype)
    total, count = sum_over_ranks(torch.stack([total, counted]), spec.group).unbind()
    return total / count.detach()


# ---- slices of the sequence


def get_item(x: Tensor, index: Any) -> Any:
    """`x[:, :-1]` and the like: the positions keep their ranks, and each rank drops what the slice leaves out."""
    if not isinstance(x, SequenceView) or x.spec.shard.outer != 1 or x.spec.shard.inner != 1:
        return NotImplemented
    items = index if isinstance(index, tuple) else (index,)
    position = _sequence_item(items, x)
    if position is None:
        return NotImplemented
    start, stop, step = items[position].indices(x.shape[x.spec.shard.dim])
    if step != 1 or (start, stop) == (0, x.spec.length) or stop <= start:
        return NotImplemented
    narrowed = _narrow(x, start, stop)
    if narrowed is None:
        return NotImplemented
    join_memory(x, narrowed)
    return narrowed[(*items[:position], slice(None), *items[position + 1 :])]


def _sequence_item(items: tuple[Any, ...], x: SequenceView) -> int | None:
    """The number of the item that slices the positions; None if there is none, or an item is a list or a tensor."""
    if not all(item is None or item is Ellipsis or isinstance(item, int | slice) for item in items):
        return None
    taken = sum(item is not None and item is not Ellipsis for item in items)
    dim = 0
    for number, item in enumerate(items):
        if item is Ellipsis:
            dim += x.dim() - taken
        elif item is not None:
            if dim == x.spec.shard.dim:
                return number if isinstance(item, slice) else None
            dim += 1
    return None


def _narrow(x: SequenceView, start: int, stop: int) -> SequenceView | None:
    """The positions from `start` to `stop`, as a view; None if a rank would have none of them."""
    spec, dim = x.spec, x.spec.shard.dim
    tokens = tuple(_clipped(ranges, start, stop) for ranges in spec.tokens)
    if not all(any(length for _, length in ranges) for ranges in tokens):
        return None
    # A rank holds its positions in ascending order, so those between two positions lie next to each other.
    begin = sum(min(length, max(0, start - first)) for first, length in spec.tokens[spec.group.rank])
    local = x.local_tensor.narrow(dim, begin, sum(length for _, length in tokens[spec.group.rank]))
    new_spec = replace(with_dim(replace(spec, tokens=tokens), dim))
    shape = list(x.shape)
    shape[dim] = stop - start
    return SequenceView(local, new_spec, tuple(shape))


def _clipped(ranges: IndexRanges, start: int, stop: int) -> IndexRanges:
    clipped = ((max(first, start), min(first + length, stop)) for first, length in ranges)
    return tuple((low - start, high - low) for low, high in clipped if high > low)


RULES: dict[Any, Callable[..., Any]] = {
    torch.embedding: embedding,
    linear_function: linear,
    torch.addmm: addmm,
    torch.Tensor.addmm: addmm,
    attention_function: attention,
    cross_entropy_function: cross_entropy,
    nll_loss_function: nll_loss,
    torch.Tensor.__getitem__: get_item,
}

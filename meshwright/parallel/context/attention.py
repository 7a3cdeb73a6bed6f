"""Attention whose queries, keys and values are divided by position over the ranks of the context axis.

Each rank computes the output of its own queries. Keys and values come from the other ranks (exchange.py) and are
combined tile by tile (tiles.py). Only a rank's own queries, keys, values and outputs are saved for the backward pass.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parallel.context.exchange import Exchange, KeyValueShard, Part, key_value_gradients, key_value_shards
from meshwright.parallel.context.tiles import (
    Dropout,
    Merged,
    Tile,
    attend,
    causal_tiles,
    full_tiles,
    gradients,
    masked_tiles,
    tiles_of_part,
)
from meshwright.parallel.differentiable_collectives import AxisGroup, IndexRanges


@dataclass(frozen=True)
class AttentionCall:
    """One call of attention. `query_tokens` are the positions of this rank's queries, `key_tokens` those of each rank's
    keys."""

    query_tokens: IndexRanges
    key_tokens: tuple[IndexRanges, ...]
    group: AxisGroup
    exchange: Exchange
    scale: float
    causal: bool
    dropout: Dropout | None

    def tiles(self, shard: KeyValueShard, mask: Tensor | None) -> list[Tile]:
        """The tiles that this rank's queries have with a shard of keys and values."""
        device = shard.key.device
        if mask is not None:
            tiles = masked_tiles(self.query_tokens, shard.positions, mask)
        elif self.causal:
            tiles = causal_tiles(self.query_tokens, shard.positions, device)
        else:
            tiles = full_tiles(self.query_tokens, shard.positions)
        if self.dropout is None:
            return tiles
        # The seed differs from shard to shard, since local keys of different shards have the same numbers.
        dropout = Dropout(self.dropout.probability, self.dropout.seed + shard.positions[0][0])
        return [Tile(tile.queries, tile.keys, tile.causal, tile.mask, dropout) for tile in tiles]


def attend_over_ranks(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall) -> Tensor:
    """The attention's output for this rank's queries (batch, heads, local positions, width). There may be fewer heads
    of keys and values than of queries. The mask, which needs no gradient, is that of all positions."""
    output: Tensor = _Attention.apply(query, key, value, mask, call)
    return output


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, call: AttentionCall
    ) -> Tensor:
        merged = Merged(query, value.shape[-1])
        with torch.autocast(query.device.type, enabled=False):
            for shard in key_value_shards(key, value, call.key_tokens, call.group, call.exchange):
                for tile in call.tiles(shard, mask):
                    keys, values = (_tile_heads(tensor, tile.keys, query) for tensor in (shard.key, shard.value))
                    merged.add(tile, *attend(_rows(query, tile.queries), keys, values, tile, call.scale))
        output = merged.output.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, output, merged.log_sum)
        ctx.call = call
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, output, log_sum = ctx.saved_tensors
        call: AttentionCall = ctx.call
        grad_query = torch.zeros_like(query, dtype=log_sum.dtype)

        def gradients_of(shard: KeyValueShard, part: Part) -> tuple[Tensor, Tensor]:
            grad_key, grad_value = (
                torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in (shard.key, shard.value)
            )
            for tile in tiles_of_part(call.tiles(shard, mask), part):
                keys, values = (_tile_heads(tensor, tile.keys, query) for tensor in (shard.key, shard.value))
                rows = tile.queries
                of_query, of_key, of_value = gradients(
                    _rows(grads[0], rows),
                    _rows(query, rows),
                    keys,
                    values,
                    tile,
                    _rows(output, rows),
                    log_sum[..., rows[0] : rows[1]].contiguous(),
                    call.scale,
                )
                grad_query[..., rows[0] : rows[1], :] += of_query
                grad_key[..., tile.keys[0] : tile.keys[1], :] += _sum_heads(of_key, key)
                grad_value[..., tile.keys[0] : tile.keys[1], :] += _sum_heads(of_value, value)
            return grad_key, grad_value

        with torch.autocast(query.device.type, enabled=False):
            grad_key, grad_value = key_value_gradients(
                key, value, call.key_tokens, call.group, call.exchange, gradients_of
            )
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _rows(tensor: Tensor, rows: tuple[int, int]) -> Tensor:
    return tensor[..., rows[0] : rows[1], :].contiguous()


def _tile_heads(tensor: Tensor, rows: tuple[int, int], query: Tensor) -> Tensor:
    """Some keys or values, repeated for all query heads that share them."""
    part = tensor[..., rows[0] : rows[1], :]
    return part.repeat_interleave(query.shape[-3] // part.shape[-3], -3) if query.dim() > 2 else part


def _sum_heads(gradient: Tensor, tensor: Tensor) -> Tensor:
    """The gradient of keys or values that several query heads share."""
    if tensor.dim() < 3 or gradient.shape[-3] == tensor.shape[-3]:
        return gradient
    return gradient.unflatten(-3, (tensor.shape[-3], -1)).sum(-3)

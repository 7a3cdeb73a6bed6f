"""Attention of some queries to some keys, as tiles whose results are merged.

With s the scores of one query, a tile of keys T gives

    L_T = log Σ_{j in T} exp(s_j)                 o_T = Σ_{j in T} exp(s_j - L_T) v_j              attend()
    L   = log(exp(L) + exp(L_T))                  o   = exp(L - L') o + exp(L_T - L') o_T           Merged.add()

and with the merged o and L the gradient of each tile is that of ordinary attention (`gradients`), whatever other tiles
there are, because exp(s_j - L) is the weight of key j among all keys.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from meshwright.data.order import derive_seed
from meshwright.parallel.differentiable_collectives import IndexRanges
from meshwright.parallel.torch_private import (
    cpu_attention,
    cpu_attention_gradients,
    flash_attention,
    flash_attention_gradients,
)

_LARGEST_SCORES = 2**26  # elements; more queries are computed one part after the other


@dataclass(frozen=True)
class Dropout:
    """Dropout of the attention weights. The seed gives the same masks in the forward and the backward pass."""

    probability: float
    seed: int


@dataclass(frozen=True)
class Tile:
    """Local `queries` that attend to local `keys`, both as (begin, end). With `causal`, query i attends to the keys up
    to i, and there are equally many. `mask` is added to the scores, or says which of them count."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool = False
    mask: Tensor | None = None
    dropout: Dropout | None = None


def full_tiles(queries: IndexRanges, keys: IndexRanges) -> list[Tile]:
    """All queries attend to all keys."""
    return [Tile((0, _total(queries)), (0, _total(keys)))]


def causal_tiles(queries: IndexRanges, keys: IndexRanges, device: torch.device) -> list[Tile]:
    """Each query attends to the keys at its own position and before. The ranges are positions, in ascending order."""
    tiles: list[Tile] = []
    query_begin = 0
    for position, length in queries:
        rows = (query_begin, query_begin + length)
        query_begin += length
        key_begin = earlier = 0  # keys that all queries of this range attend to; they come first, in ascending order
        diagonal: list[Tile] = []
        for first, count in keys:
            before = min(max(position - first, 0), count)
            earlier += before
            overlap = min(position + length, first + count) - (first + before)
            if overlap > 0:
                columns = (key_begin + before, key_begin + before + overlap)
                is_square = overlap == length and first + before == position
                mask = None if is_square else _positions_mask(position, length, first + before, overlap, device)
                diagonal.append(Tile(rows, columns, is_square, mask))
            key_begin += count
        if earlier:
            last = tiles[-1] if tiles else None
            if last and not diagonal and last.keys == (0, earlier) and last.queries[1] == rows[0] and not last.causal:
                tiles[-1] = Tile((last.queries[0], rows[1]), (0, earlier))
            else:
                tiles.append(Tile(rows, (0, earlier)))
        tiles += diagonal
    return [tile for tile in tiles if tile.queries[0] < tile.queries[1]]


def masked_tiles(queries: IndexRanges, keys: IndexRanges, mask: Tensor) -> list[Tile]:
    """All queries attend to all keys as the mask says, whose last two dimensions are all queries (or 1) and all keys
    (or 1)."""
    rows = mask if mask.shape[-2] == 1 else _selected(mask, -2, queries)
    part = rows if mask.shape[-1] == 1 else _selected(rows, -1, keys)
    return [Tile((0, _total(queries)), (0, _total(keys)), mask=part)]


def tiles_of_part(tiles: list[Tile], part: Literal["all", "first", "second"]) -> list[Tile]:
    """Some of the tiles, or all of them. The first and the second part are about equal work. A single tile is cut
    between two queries, unless it draws random numbers, which are those of the whole tile."""
    if part == "all":
        return tiles
    if len(tiles) == 1 and not tiles[0].causal and tiles[0].dropout is None:
        tiles = _halves(tiles[0])
    parts: dict[str, list[Tile]] = {"first": [], "second": []}
    for tile in sorted(tiles, key=_scores_count, reverse=True):
        smallest = min(parts.values(), key=lambda some: sum(map(_scores_count, some)))
        smallest.append(tile)
    return parts[part]


def _halves(tile: Tile) -> list[Tile]:
    begin, end = tile.queries
    middle = (begin + end) // 2
    masks = [tile.mask, tile.mask]
    if tile.mask is not None and tile.mask.shape[-2] != 1:
        masks = [tile.mask[..., : middle - begin, :], tile.mask[..., middle - begin :, :]]
    rows = ((begin, middle), (middle, end))
    return [replace(tile, queries=queries, mask=mask) for queries, mask in zip(rows, masks, strict=True)]


def _scores_count(tile: Tile) -> float:
    """The number of scores that a tile computes."""
    scores = (tile.queries[1] - tile.queries[0]) * (tile.keys[1] - tile.keys[0])
    return scores / 2 if tile.causal else scores


def _selected(tensor: Tensor, dim: int, ranges: IndexRanges) -> Tensor:
    parts = [tensor.narrow(dim, first, length) for first, length in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _positions_mask(query: int, queries: int, key: int, keys: int, device: torch.device) -> Tensor:
    rows = torch.arange(query, query + queries, device=device)
    return rows[:, None] >= torch.arange(key, key + keys, device=device)


def _total(ranges: IndexRanges) -> int:
    return sum(length for _, length in ranges)


class Merged:
    """The result of the tiles so far: `output` and `log_sum` of all queries."""

    def __init__(self, query: Tensor, value_width: int) -> None:
        dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
        self.output = query.new_zeros((*query.shape[:-1], value_width), dtype=dtype)
        self.log_sum = query.new_full(query.shape[:-1], -torch.inf, dtype=dtype)

    def add(self, tile: Tile, output: Tensor, log_sum: Tensor) -> None:
        begin, end = tile.queries
        so_far, sum_so_far = self.output[..., begin:end, :], self.log_sum[..., begin:end]
        total = torch.logaddexp(sum_so_far, log_sum)
        # A query without any key so far, or in this tile, has the log-sum -inf: its weight is 0, not exp(-inf + inf).
        old, new = ((part - total).exp().nan_to_num_(0.0).unsqueeze(-1) for part in (sum_so_far, log_sum))
        so_far.mul_(old).add_(output.to(so_far.dtype) * new)
        sum_so_far.copy_(total)


def attend(query: Tensor, key: Tensor, value: Tensor, tile: Tile, scale: float) -> tuple[Tensor, Tensor]:
    """The output and the log-sum of one tile. Query, key and value are those of the tile, with equally many heads."""
    if _has_cpu_kernel(query, value, tile):
        return cpu_attention(query, key, value, tile.causal, scale)
    if _has_flash_kernel(query, value, tile):
        return flash_attention(query, key, value, tile.causal, scale)
    outputs, sums = [], []
    for rows in _row_parts(query, key):
        scores = _scores(query, key, tile, scale, rows)
        log_sum = scores.logsumexp(-1)
        weights = (scores - log_sum.unsqueeze(-1)).exp().nan_to_num_(0.0)
        if tile.dropout is not None:
            weights = weights * _kept(weights, tile, rows)
        outputs.append(weights.to(value.dtype) @ value)
        sums.append(log_sum)
    return torch.cat(outputs, -2), torch.cat(sums, -1)


def gradients(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, tile: Tile, output: Tensor, log_sum: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value from one tile. `output` and `log_sum` are those of all tiles together."""
    if _has_cpu_kernel(query, value, tile):
        return cpu_attention_gradients(grad, query, key, value, output, log_sum, tile.causal, scale)
    if _has_flash_kernel(query, value, tile):
        return flash_attention_gradients(grad, query, key, value, output, log_sum, tile.causal, scale)
    grad_query = torch.empty_like(query)
    grad_key, grad_value = (torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in (key, value))
    dots = (grad.to(log_sum.dtype) * output.to(log_sum.dtype)).sum(-1, keepdim=True)
    for rows in _row_parts(query, key):
        scores = _scores(query, key, tile, scale, rows)
        weights = (scores - log_sum[..., rows].unsqueeze(-1)).exp().nan_to_num_(0.0)
        grad_weights = (grad[..., rows, :] @ value.transpose(-1, -2)).to(weights.dtype)
        used = weights
        if tile.dropout is not None:
            kept = _kept(weights, tile, rows)
            used, grad_weights = weights * kept, grad_weights * kept
        grad_value += used.transpose(-1, -2) @ grad[..., rows, :].to(used.dtype)
        grad_scores = weights * (grad_weights - dots[..., rows, :]) * scale
        grad_query[..., rows, :] = (grad_scores @ key.to(grad_scores.dtype)).to(query.dtype)
        grad_key += grad_scores.transpose(-1, -2) @ query[..., rows, :].to(grad_scores.dtype)
    return grad_query, grad_key, grad_value


def _has_cpu_kernel(query: Tensor, value: Tensor, tile: Tile) -> bool:
    is_plain = tile.mask is None and tile.dropout is None and value.shape[-1] == query.shape[-1]
    return query.device.type == "cpu" and is_plain


def _has_flash_kernel(query: Tensor, value: Tensor, tile: Tile) -> bool:
    width = query.shape[-1]
    is_plain = tile.mask is None and tile.dropout is None and value.shape[-1] == width
    half = query.dtype in (torch.bfloat16, torch.float16)
    return query.is_cuda and is_plain and half and width % 8 == 0 and width <= 256


def _row_parts(query: Tensor, key: Tensor) -> Iterator[slice]:
    """Parts of the queries whose scores fit into `_LARGEST_SCORES` elements."""
    rows = query.shape[-2]
    per_row = query[..., 0, 0].numel() * key.shape[-2]
    count = max(1, min(rows, _LARGEST_SCORES // max(per_row, 1)))
    for begin in range(0, max(rows, 1), count):
        yield slice(begin, min(begin + count, rows))


def _scores(query: Tensor, key: Tensor, tile: Tile, scale: float, rows: slice) -> Tensor:
    # Not in place: selective recomputation keeps the results of products, and would get them back changed.
    scores = (query[..., rows, :] @ key.transpose(-1, -2)) * scale
    scores = scores if scores.dtype == torch.float64 else scores.float()
    mask = tile.mask
    if tile.causal:
        mask = _positions_mask(rows.start, rows.stop - rows.start, 0, key.shape[-2], query.device)
    elif mask is not None and mask.shape[-2] != 1:
        mask = mask[..., rows, :]
    if mask is None:
        return scores
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask


def _kept(weights: Tensor, tile: Tile, rows: slice) -> Tensor:
    """Which weights dropout keeps, divided by the probability that it does."""
    assert tile.dropout is not None
    generator = torch.Generator(weights.device)
    generator.manual_seed(derive_seed(tile.dropout.seed, "tile", tile.queries[0] + rows.start, tile.keys[0]))
    kept = torch.rand(weights.shape, generator=generator, device=weights.device) >= tile.dropout.probability
    return kept / (1 - tile.dropout.probability)

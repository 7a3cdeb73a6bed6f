"""How the ranks of the context axis give each other keys and values.

    all_gather   all shards at once in the forward pass, again in the backward pass, and a reduce-scatter of gradients
    ring         in N - 1 steps each rank passes the shard on that it has received, while it computes with it; in the
                 backward pass the gradients of a shard follow it, from the rank after its own one on, and reach its own
                 rank after N - 1 steps

Bytes that a rank sends, with N ranks and b the bytes of its keys and values, g those of their gradients, are the same
for both: (N - 1) · b in the forward pass, and (N - 1) · (b + g) in the backward pass. A ring sends all of them while it
computes: of its own shard, which needs no other rank, a rank computes a part while the first keys and values arrive,
and the rest while the last gradients do.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.differentiable_collectives import (
    AxisGroup,
    IndexRanges,
    ShardRanges,
    all_gather_tensor,
    reduce_scatter_tensor,
)

Exchange = Literal["all_gather", "ring"]
_KEYS_AND_VALUES, _GRADIENTS = 1, 2  # tags of messages


@dataclass(frozen=True)
class KeyValueShard:
    """Keys and values of these positions."""

    positions: IndexRanges
    key: Tensor
    value: Tensor


# Returns the gradients of a shard's keys and values: of all of its work, or of the first or the second part.
Part = Literal["all", "first", "second"]
ShardGradients = Callable[[KeyValueShard, Part], tuple[Tensor, Tensor]]


def key_value_shards(
    key: Tensor, value: Tensor, tokens: tuple[IndexRanges, ...], group: AxisGroup, exchange: Exchange
) -> Iterator[KeyValueShard]:
    """The keys and values of all ranks. `tokens` has the positions of each rank. With a ring, the next shard is on its
    way while the caller computes with the one before."""
    if exchange == "all_gather":
        yield _gathered(key, value, tokens, group)
        return
    packed = _pack(key, value)
    for step in range(group.size):
        owner = (group.rank - step) % group.size
        is_last = step == group.size - 1
        arriving = None if is_last else _pass_on(packed, _next_size(packed, tokens, owner), group)
        yield KeyValueShard(tokens[owner], *_unpack(packed, key, value, _length(tokens[owner])))
        if arriving is not None:
            packed = arriving()


def key_value_gradients(
    key: Tensor,
    value: Tensor,
    tokens: tuple[IndexRanges, ...],
    group: AxisGroup,
    exchange: Exchange,
    gradients_of: ShardGradients,
) -> tuple[Tensor, Tensor]:
    """The gradients of this rank's keys and values: the sum over the ranks of what `gradients_of` returns for them."""
    if exchange == "all_gather":
        grads = gradients_of(_gathered(key, value, tokens, group), "all")
        ranges = _ranges(key, tokens)
        grad_key, grad_value = (reduce_scatter_tensor(grad, ranges, group) for grad in grads)
        return grad_key, grad_value
    arriving: Callable[[], Tensor] | None = None
    shards = enumerate(key_value_shards(key, value, tokens, group, "ring"))
    _, own_shard = next(shards)
    own = _pack(*gradients_of(own_shard, "first"))
    for step, shard in shards:
        packed = _pack(*gradients_of(shard, "all"))
        if arriving is not None:
            packed += arriving()
        owner = (group.rank - step) % group.size
        arriving = _pass_on(packed, _next_size(packed, tokens, owner), group, _GRADIENTS)
    own += _pack(*gradients_of(own_shard, "second"))
    assert arriving is not None, "a context axis has at least two ranks"
    return _unpack(own + arriving(), key, value, key.shape[-2])


def _gathered(key: Tensor, value: Tensor, tokens: tuple[IndexRanges, ...], group: AxisGroup) -> KeyValueShard:
    ranges = _ranges(key, tokens)
    gathered_key, gathered_value = (all_gather_tensor(tensor, ranges, group) for tensor in (key, value))
    return KeyValueShard(((0, ranges.size),), gathered_key, gathered_value)


def _ranges(key: Tensor, tokens: tuple[IndexRanges, ...]) -> ShardRanges:
    return ShardRanges(key.dim() - 2, sum(map(_length, tokens)), tokens)


def _length(ranges: IndexRanges) -> int:
    return sum(length for _, length in ranges)


# ---- the ring


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Keys and values as one message; their widths may differ."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(packed: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor]:
    shapes = [(*tensor.shape[:-2], length, tensor.shape[-1]) for tensor in (key, value)]
    first = torch.Size(shapes[0]).numel()
    return packed[:first].view(shapes[0]), packed[first:].view(shapes[1])


def _next_size(packed: Tensor, tokens: tuple[IndexRanges, ...], owner: int) -> int:
    """The size of the message that arrives after `packed`, which is of the positions of `owner`: that of the rank
    before it."""
    return packed.numel() // _length(tokens[owner]) * _length(tokens[owner - 1])


def _pass_on(packed: Tensor, size: int, group: AxisGroup, tag: int = _KEYS_AND_VALUES) -> Callable[[], Tensor]:
    """Starts sending the message to the next rank, and receiving one of `size` elements from the rank before. Returns a
    function that waits for it. Gloo cannot send CUDA tensors from one rank to another: they go through CPU memory."""
    process_group, device = group.process_group, packed.device
    through_host = packed.is_cuda and dist.get_backend(process_group) != "nccl"
    sent = packed.cpu() if through_host else packed
    received = sent.new_empty(size)
    after, before = (dist.get_global_rank(process_group, (group.rank + step) % group.size) for step in (1, -1))
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, after, process_group, tag),
            dist.P2POp(dist.irecv, received, before, process_group, tag),
        ]
    )

    def wait() -> Tensor:
        with WAIT_CLOCK.blocked():
            for work in works:
                work.wait()
        assert sent is not None  # the message must live until it is sent
        return received.to(device) if through_host else received

    return wait

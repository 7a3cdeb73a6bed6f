"""Sends rows to the ranks that hold their experts, and back.

The rows that a rank sends are in the order of the experts, and so in the order of the ranks that hold them. What it
receives is in the order of the ranks that sent it, and for each of them in the order of its own experts:

    sent[e]                 rows that this rank sends to expert e
    received[r][e]          rows that rank r sends to this rank's expert e               ExchangedCounts
    forward                 all-to-all of rows, sizes sent → received                    exchange_rows()
    backward                all-to-all of their gradients, sizes received → sent         the same function

Every rank takes part in every exchange and in its backward pass, also if it has nothing to send or to receive.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.collectives.wait_clock import WAIT_CLOCK
from meshwright.parallel.differentiable_collectives import AxisGroup, has_every_collective


@dataclass(frozen=True)
class ExchangedCounts:
    """How many rows go from which rank to which expert. `sent` has one number per expert of the layer, `received` for
    each rank one number per expert of this rank."""

    sent: tuple[int, ...]
    received: tuple[tuple[int, ...], ...]

    @property
    def rows_to_ranks(self) -> list[int]:
        """The number of rows that this rank sends to each rank."""
        local = len(self.received[0])
        return [sum(self.sent[begin : begin + local]) for begin in range(0, len(self.sent), local)]

    @property
    def rows_from_ranks(self) -> list[int]:
        """The number of rows that this rank receives from each rank."""
        return [sum(of_rank) for of_rank in self.received]

    @property
    def received_rows(self) -> int:
        return sum(self.rows_from_ranks)


def exchange_counts(sent: Tensor, group: AxisGroup) -> ExchangedCounts:
    """Tells every rank how many rows it will receive for each of its experts. `sent` (int64) has one number per expert
    of the layer. The host waits for the device, because the sizes of tensors depend on the counts."""
    local = sent.numel() // group.size
    received = _all_to_all(sent, [local] * group.size, [local] * group.size, group)
    numbers = torch.stack([sent, received]).tolist()
    of_ranks = tuple(tuple(numbers[1][begin : begin + local]) for begin in range(0, sent.numel(), local))
    return ExchangedCounts(tuple(numbers[0]), of_ranks)


def exchange_rows(x: Tensor, send: Sequence[int], receive: Sequence[int], group: AxisGroup) -> Tensor:
    """Returns the rows that the ranks send to this rank: `receive[r]` rows from rank r. Of `x`, the first `send[0]`
    rows go to rank 0, the next `send[1]` rows to rank 1, and so on."""
    # With the anchor, the result requires gradients on every rank, and so every rank takes part in the backward pass.
    anchor = x.new_zeros((), requires_grad=x.is_floating_point() and torch.is_grad_enabled())
    received: Tensor = _ExchangeRows.apply(x, anchor, list(send), list(receive), group)
    return received


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, send: list[int], receive: list[int], group: AxisGroup) -> Tensor:
        ctx.sizes, ctx.group, ctx.shape, ctx.dtype = (send, receive), group, anchor.shape, anchor.dtype
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        send, receive = ctx.sizes
        gradient = exchange_rows(grads[0], receive, send, ctx.group)
        return gradient, torch.zeros(ctx.shape, dtype=ctx.dtype, device=gradient.device), None, None, None


def _all_to_all(x: Tensor, send: list[int], receive: list[int], group: AxisGroup) -> Tensor:
    if not has_every_collective(x, group):
        return _all_to_all_by_gathering(x, send, group)
    received = x.new_empty((sum(receive), *x.shape[1:]))
    with WAIT_CLOCK.blocked():
        dist.all_to_all_single(received, x.contiguous(), receive, send, group=group.process_group)
    return received


def _all_to_all_by_gathering(x: Tensor, send: list[int], group: AxisGroup) -> Tensor:
    """The same by gathering the rows of all ranks, for CUDA tensors over Gloo, which has no all-to-all for them."""
    sizes = torch.tensor(send, dtype=torch.int64, device=x.device)
    of_ranks = [torch.empty_like(sizes) for _ in range(group.size)]
    with WAIT_CLOCK.blocked():
        dist.all_gather(of_ranks, sizes, group=group.process_group)
    by_rank: list[list[int]] = torch.stack(of_ranks).tolist()
    padded = x.new_zeros((max(map(sum, by_rank)), *x.shape[1:]))
    padded[: x.shape[0]] = x.detach()
    gathered = [torch.empty_like(padded) for _ in range(group.size)]
    with WAIT_CLOCK.blocked():
        dist.all_gather(gathered, padded, group=group.process_group)
    pieces = [rows.split([*sizes, len(rows) - sum(sizes)]) for rows, sizes in zip(gathered, by_rank, strict=True)]
    return torch.cat([of_rank[group.rank] for of_rank in pieces])

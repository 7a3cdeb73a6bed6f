"""A mixture of experts in place of a feed-forward layer: a router chooses `top_k` of the experts for each token.

    p = softmax(router(x))                              over the experts, in fp32 or wider
    y = Σ over the top_k experts of  p_e / Σ p · expert_e(x)

With a capacity c, an expert takes at most ceil(c · length · top_k / number) tokens of one sequence, the first ones; the
choices of other tokens are dropped. It is counted for each sequence by itself, so that the result depends on no other
sample, and no plan changes it.

The weights of all experts are stacked, with one row per expert. Each product is one grouped product over rows that are
sorted by expert; in fp64, for which torch has no such kernel, it is a loop.
"""

from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.model_io.batch import at_least_fp32


class Mixture(nn.Module):
    """Maps (batch, length, hidden) to the same shape. `number` experts have the inner width `inner_width` each."""

    def __init__(
        self, hidden: int, inner_width: int, number: int, top_k: int, activation: str, capacity: float | None = None
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= number or number < 2:
            raise InputError(
                f"the decoder's experts have number {number} and top_k {top_k}: write a number of at least 2, and a"
                " top_k between 1 and this number"
            )
        if capacity is not None and capacity <= 0:
            raise InputError(f"the decoder's experts have capacity {capacity}: write a positive number, or none")
        self.top_k = top_k
        self.capacity = capacity
        self.router = nn.Linear(hidden, number, bias=False)
        self.experts = Experts(hidden, inner_width, number, activation)

    def forward(self, x: Tensor) -> Tensor:
        probabilities = at_least_fp32(self.router(x)).softmax(-1)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        if self.capacity is not None:
            chosen = self._without_overflow(chosen, self.capacity)
        out: Tensor = self.experts(x.flatten(0, -2), chosen.flatten(0, -2), weights.flatten(0, -2))
        return out.view_as(x)

    def _without_overflow(self, chosen: Tensor, capacity: float) -> Tensor:
        """Returns the choices, with the number of experts in place of those that exceed the capacity."""
        number = self.experts.num_experts
        flat = chosen.flatten(-2)
        limit = ceil(capacity * flat.shape[-1] / number)
        earlier = F.one_hot(flat, number).cumsum(-2).gather(-1, flat[..., None]).squeeze(-1)
        return torch.where(earlier > limit, number, flat).view_as(chosen)


class Experts(nn.Module):
    """The experts of a mixture. It is called with tokens (T, hidden), the numbers of their experts (T, choices), where
    `num_experts` stands for a dropped choice, and the weights of the choices (T, choices)."""

    def __init__(self, hidden: int, inner_width: int, number: int, activation: str) -> None:
        super().__init__()
        self.num_experts = number
        self.up = nn.Parameter(torch.empty(number, inner_width, hidden))
        gate = nn.Parameter(torch.empty(number, inner_width, hidden)) if activation == "swiglu" else None
        self.register_parameter("gate", gate)
        self.down = nn.Parameter(torch.empty(number, hidden, inner_width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        flat = choices.reshape(-1)
        order = flat.argsort(stable=True)
        counts = flat.new_zeros(self.num_experts + 1).scatter_add(0, flat, torch.ones_like(flat))[:-1]
        ends = counts.cumsum(0).int()  # where the rows of each expert end
        # Grouped products leave rows without an expert undefined, and the gradients of these rows, too.
        is_dropped = (flat.index_select(0, order) == self.num_experts)[:, None]
        rows = tokens.index_select(0, order // choices.shape[-1]).masked_fill(is_dropped, 0.0)
        up = grouped_product(rows, self.up, ends)
        gate = grouped_product(rows, self.gate, ends) if isinstance(self.gate, Tensor) else None
        inner = F.gelu(up, approximate="tanh") if gate is None else F.silu(gate) * up
        out = grouped_product(inner, self.down, ends).masked_fill(is_dropped, 0.0)
        out = out * weights.reshape(-1, 1).index_select(0, order).to(rows.dtype)
        ordered = torch.zeros_like(out).index_copy(0, order, out)
        return ordered.view(*choices.shape, -1).sum(1)


def grouped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns rows (n, k) times the weights (experts, m, k) of their experts. The rows of expert e end at `ends[e]`."""
    if rows.dtype != torch.float64:
        return F.grouped_mm(rows.to(weight.dtype), weight.transpose(-2, -1), offs=ends)
    product: Tensor = torch.ops.meshwright.looped_product(rows, weight, ends)
    return product


@torch.library.custom_op("meshwright::looped_product", mutates_args=())
def _looped_product(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    product, begin = rows.new_zeros(len(rows), weight.shape[1]), 0
    for number, end in enumerate(ends.tolist()):
        product[begin:end] = rows[begin:end] @ weight[number].T
        begin = end
    return product


@torch.library.custom_op("meshwright::looped_weight_gradient", mutates_args=())
def _looped_weight_gradient(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    result, begin = rows.new_zeros(len(ends), gradient.shape[1], rows.shape[1]), 0
    for number, end in enumerate(ends.tolist()):
        result[number] = gradient[begin:end].T @ rows[begin:end]
        begin = end
    return result


@_looped_product.register_fake
def _(rows: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[1])


@_looped_weight_gradient.register_fake
def _(gradient: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty(ends.shape[0], gradient.shape[1], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weight, ends = ctx.saved_tensors
    of_rows = torch.ops.meshwright.looped_product(gradient, weight.transpose(1, 2).contiguous(), ends)
    return of_rows, torch.ops.meshwright.looped_weight_gradient(gradient.contiguous(), rows, ends), None


_looped_product.register_autograd(_gradients, setup_context=_save)

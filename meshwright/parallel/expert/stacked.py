"""Experts whose weights are stacked in one tensor: each rank holds the weights of some of them, and computes these for
the tokens of all ranks of the expert axis.

The module is called as in the untouched model, with the tokens (T, width), the numbers of the experts of each token
(T, choices) and their weights (T, choices). On a rank, its own forward function is called with one choice per row:

    rows, weights       the pairs of a token and an expert, sorted by expert             _sort_by_expert()
    all-to-all          to the ranks of the experts                                      exchange_rows()
    the module          on the received rows, with experts numbered from 0 on this rank
    all-to-all          back
    sum                 over the choices of each token                                   _sum_over_choices()

The kernel is the module's own: a loop, batched or grouped products. Gradients of tokens are exact for any routing. The
gradient of an expert is the sum over the tokens of all ranks of the axis; it is divided by their number, so that the
mean over the ranks that hold a copy of the expert is the mean over all data ranks.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.context.experts import call_on_local_tokens
from meshwright.parallel.differentiable_collectives import AxisGroup, scale_gradient
from meshwright.parallel.expert.exchange import exchange_counts, exchange_rows
from meshwright.parallel.expert.loads import ExpertLoads
from meshwright.parallel.tensor.shard_view import gather_shard_views


class StackedExperts:
    """Replaces the forward function of a module with stacked weights, of which this rank holds `experts` / ranks."""

    def __init__(self, name: str, module: nn.Module, experts: int, group: AxisGroup, loads: ExpertLoads) -> None:
        self._name = name
        self._module = module
        self._forward: Callable[..., Tensor] = module.forward
        self._signature = inspect.signature(type(module).forward)
        self._experts = experts
        self._group = group
        self._loads = loads

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        bound = self._signature.bind(self._module, *args, **kwargs).arguments
        return call_on_local_tokens(self._call, *(gather_shard_views(value) for value in list(bound.values())[1:4]))

    def _call(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        self._check(tokens, choices, weights)
        output = self._run(tokens.reshape(-1, tokens.shape[-1]), choices.reshape(-1, choices.shape[-1]), weights)
        return output.view(*tokens.shape[:-1], output.shape[-1]).to(tokens.dtype)

    def _run(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        group, choice_count = self._group, choices.shape[-1]
        order, counts = _sort_by_expert(choices.reshape(-1), self._experts)
        exchanged = exchange_counts(counts, group)
        self._loads.add(self._name, exchanged.sent, self._module.training)
        self._loads.add_rows(self._name, routed=sum(exchanged.sent))
        order = order[: sum(exchanged.sent)]  # choices of no expert, which models mark with larger numbers, come last
        send, receive = exchanged.rows_to_ranks, exchanged.rows_from_ranks
        rows = exchange_rows(tokens.index_select(0, order // choice_count), send, receive, group)
        row_weights = exchange_rows(weights.reshape(-1, 1).index_select(0, order), send, receive, group)
        local = torch.tensor(exchanged.received, device=order.device)
        numbers = torch.arange(local.shape[1], device=order.device).repeat(group.size)
        experts = numbers.repeat_interleave(local.flatten(), output_size=exchanged.received_rows)
        computed = self._compute(rows, experts, row_weights)
        return _sum_over_choices(exchange_rows(computed, receive, send, group), order, len(tokens), choice_count)

    def _compute(self, rows: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Calls the module on the received rows. Without any, it gets a row of zeros, whose result is dropped: the
        gradients of its weights are zeros then, as those of unused experts are on one device."""
        received = len(rows)
        self._loads.add_rows(self._name, computed=received)
        if not received:
            rows = torch.cat([rows, rows.new_zeros(1, rows.shape[1])])
            weights = torch.cat([weights, weights.new_zeros(1, 1)])
            experts = experts.new_zeros(1)
        ranks = float(self._group.size)
        rows, weights = scale_gradient(rows, ranks), scale_gradient(weights, ranks)
        with self._local_number():
            computed = self._forward(rows, experts[:, None], weights)
        return scale_gradient(computed, 1 / ranks)[:received]

    @contextmanager
    def _local_number(self) -> Iterator[None]:
        """Within this context, the module has the number of this rank's experts. Other modules, such as the router, may
        read the number of all of them."""
        module: Any = self._module
        module.num_experts = self._experts // self._group.size
        try:
            yield
        finally:
            module.num_experts = self._experts

    def _check(self, tokens: Tensor, choices: Tensor, weights: Tensor) -> None:
        is_integer = not (choices.is_floating_point() or choices.is_complex() or choices.dtype is torch.bool)
        if tokens.dim() < 2 or not is_integer or choices.shape != weights.shape:
            raise InputError(
                f"{self._name} is called with {_kind(tokens)}, {_kind(choices)} and {_kind(weights)}, but experts that"
                " are divided have to be called with tokens, the numbers of their experts (integers), and as many"
                " weights: set axes.expert to 1"
            )


def _sort_by_expert(choices: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Returns the positions of all choices in the order of their experts, and the number of choices of each expert."""
    choices = torch.where((choices >= 0) & (choices < experts), choices, experts).long()
    return choices.argsort(stable=True), torch.bincount(choices, minlength=experts + 1)[:experts]


def _sum_over_choices(rows: Tensor, order: Tensor, tokens: int, choice_count: int) -> Tensor:
    """Returns the sum of the rows of each token. `order` has, for each row, the position of its choice."""
    ordered = rows.new_zeros(tokens * choice_count, rows.shape[1]).index_copy(0, order, rows)
    return ordered.view(tokens, choice_count, -1).sum(1)


def _kind(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"

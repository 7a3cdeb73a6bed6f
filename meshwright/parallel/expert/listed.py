"""Experts that are equal modules in a list: each rank holds some of them, and computes these for the tokens of all
ranks of the expert axis.

The module that holds the list decides by the values of tensors which experts it calls with which rows, and may leave
out experts without rows. Ranks may therefore call different experts, but have to exchange rows together. So its forward
function runs twice, and the exchange comes between:

    1. every expert records the rows it is called with, and returns zeros
    2. rows go to the ranks of their experts, which compute them, and back                _exchange_and_compute()
    3. every expert returns its result

Only what the module itself computes (the router) runs twice. Inputs are copied for the first time, and random
generators and the module's buffers are reset after it. Gradients of the rows belong to the first pass, all others to
the second one. An expert that no rank calls has no gradient, as on one device.
"""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.differentiable_collectives import AxisGroup, scale_gradient
from meshwright.parallel.expert.exchange import exchange_counts, exchange_rows
from meshwright.parallel.expert.loads import ExpertLoads
from meshwright.parallel.torch_private import tree_map

_NOT_CALLED = -1


class RemoteExpert(nn.Module):
    """Takes the place of an expert that another rank holds. It has no parameters."""

    def forward(self, *args: Any) -> Any:
        raise AssertionError("an expert of another rank is called by the module that holds the list only")


class ListedExperts:
    """Replaces the forward function of the module that holds a list of experts. `experts` are the modules of the list,
    of which this rank holds consecutive ones."""

    def __init__(
        self, name: str, module: nn.Module, experts: list[nn.Module], group: AxisGroup, loads: ExpertLoads
    ) -> None:
        self._name = name
        self._module = module
        self._forward: Callable[..., Any] = module.forward
        self._group = group
        self._loads = loads
        local = len(experts) // group.size
        self._first_local = group.rank * local
        self.local_experts = experts[self._first_local : self._first_local + local]
        self._shapes = copy.deepcopy(self.local_experts[0]).to("meta")
        self._widths: dict[int, int] = {}  # width of the output by width of the rows
        self._inputs: dict[int, Tensor] | None = None  # by expert, in the first pass
        self._results: dict[int, Tensor] | None = None  # by expert, in the second pass
        self._expert_count = len(experts)
        for number, expert in enumerate(experts):
            expert.forward = _ExpertCall(self, number, expert.forward)

    @torch.compiler.disable
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs = self._record_inputs(args, kwargs)
        self._results = self._exchange_and_compute(inputs)
        try:
            return self._forward(*args, **kwargs)
        finally:
            self._results = None

    def call_expert(self, number: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Any) -> Any:
        """What a call of an expert does, in each of the three parts."""
        if self._inputs is None and self._results is None:
            return forward(*args, **kwargs)
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor):
            raise InputError(
                f"the experts of {self._name or 'the model'} are called with more than one tensor, but experts that are"
                " divided among ranks get their rows only: set axes.expert to 1"
            )
        (rows,) = args
        if self._inputs is None:
            result = (self._results or {})[number]
            return result.view(*rows.shape[:-1], result.shape[-1])  # -1 would be ambiguous without rows
        if number in self._inputs:
            raise InputError(
                f"expert {number} of {self._name or 'the model'} is called twice in a forward pass, but experts that"
                " are divided among ranks are called once: set axes.expert to 1"
            )
        self._inputs[number] = rows.reshape(-1, rows.shape[-1])
        return rows.new_zeros(*rows.shape[:-1], self._output_width(rows.shape[-1]))

    def _record_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, Tensor]:
        """Runs the first pass. Returns the rows with which each expert is called."""
        first_args, first_kwargs = tree_map(
            lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        buffers = [(buffer, buffer.clone()) for buffer in self._module.buffers()]
        self._inputs = {}
        try:
            with _preserved_generators(args):
                self._forward(*first_args, **first_kwargs)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
            return self._inputs
        finally:
            self._inputs = None

    def _exchange_and_compute(self, inputs: dict[int, Tensor]) -> dict[int, Tensor]:
        if not inputs:
            raise InputError(f"{self._name or 'the model'} called none of its experts: set axes.expert to 1")
        group, some = self._group, next(iter(inputs.values()))
        calls = [len(inputs[number]) if number in inputs else _NOT_CALLED for number in range(self._expert_count)]
        called = exchange_counts(torch.tensor(calls, device=some.device), group)
        sent = [max(0, count) for count in called.sent]
        self._loads.add(self._name, sent, self._module.training)
        self._loads.add_rows(self._name, routed=sum(sent))
        received = [[max(0, count) for count in of_rank] for of_rank in called.received]
        local = len(self.local_experts)
        to_ranks = [sum(sent[begin : begin + local]) for begin in range(0, len(sent), local)]
        from_ranks = [sum(of_rank) for of_rank in received]
        rows = exchange_rows(torch.cat([inputs[number] for number in sorted(inputs)]), to_ranks, from_ranks, group)
        is_called = [any(of_rank[number] != _NOT_CALLED for of_rank in called.received) for number in range(local)]
        computed = exchange_rows(self._compute(rows, received, is_called), from_ranks, to_ranks, group)
        return dict(zip(sorted(inputs), computed.split([sent[number] for number in sorted(inputs)]), strict=True))

    def _compute(self, rows: Tensor, received: list[list[int]], is_called: list[bool]) -> Tensor:
        """Returns the results of this rank's experts for the received rows, in the same order. `received` are the rows
        of each rank and local expert, `is_called` says which local experts a rank has called, maybe without rows."""
        ranks, local = float(self._group.size), len(self.local_experts)
        self._loads.add_rows(self._name, computed=len(rows))
        pieces = scale_gradient(rows, ranks).split([count for of_rank in received for count in of_rank])
        results: list[Tensor] = [rows.new_zeros(0, self._output_width(rows.shape[1]))] * len(pieces)
        for number, expert in enumerate(self.local_experts):
            if is_called[number]:
                output = scale_gradient(expert(torch.cat(pieces[number::local])), 1 / ranks)
                results[number::local] = output.split([len(piece) for piece in pieces[number::local]])
        # The sum of no rows is 0. It makes the result depend on the rows, so that all ranks exchange their gradients.
        return torch.cat([*results, rows.new_zeros(0, results[0].shape[1]) + rows[:0].sum()])

    def _output_width(self, width: int) -> int:
        if width not in self._widths:
            with torch.no_grad():
                self._widths[width] = self._shapes(torch.empty(1, width, device="meta")).shape[-1]
        return self._widths[width]


class _ExpertCall:
    """Replaces the forward function of an expert in the list."""

    def __init__(self, experts: ListedExperts, number: int, forward: Callable[..., Any]) -> None:
        self._experts = experts
        self._number = number
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._experts.call_expert(self._number, self._forward, args, kwargs)


def _preserved_generators(args: tuple[Any, ...]) -> AbstractContextManager[None]:
    """Restores the random generators of the host and of the devices of these arguments. Other devices are not used: a
    process that was forked cannot."""
    kind = next((arg.device.type for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"), None)
    return torch.random.fork_rng(devices=[]) if kind is None else torch.random.fork_rng(device_type=kind)

"""Finds the few linear layers that hold many of a model's weights and do little of its work.

Splitting them over the replicate axis saves the all-reduce of their gradients. VGG16's classifier is an example.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.linear_layers import LinearLayer, find_linear_layers

# Which chains are proposed, a choice; the simulator predicts whether a split of one of them is faster.
_LEAST_PARAMETER_SHARE = 0.05  # of the model's parameters, that a chain has at least
_MOST_FLOP_SHARE = 0.25  # of the model's FLOPs, as a share of the chain's share of parameters


@dataclass(frozen=True)
class WideChain:
    """Linear layers in a row with only element-wise operators between them, and their shares of the whole model's
    parameters and FLOPs."""

    modules: tuple[str, ...]
    parameter_share: float
    flop_share: float


def find_wide_chains(flow: Dataflow, parameters: int, count: Callable[[str], int]) -> tuple[WideChain, ...]:
    """The wide chains of a model with this number of `parameters`. `count` says for how many equal modules a traced one
    stands; a chain never includes such a module."""
    layers = find_linear_layers(flow)
    total_flops = sum(op.flops * count(flow.calls[op.call].module) for op in flow.operators)
    wide_chains = []
    for chain in _chains(flow, layers):
        if any(count(layer.module) > 1 for layer in chain):
            continue
        parameter_share = sum(layer.inputs * layer.outputs for layer in chain) / max(parameters, 1)
        flops = sum(flow.operators[number].flops for layer in chain for number in layer.operators)
        flop_share = flops / max(total_flops, 1)
        if parameter_share >= _LEAST_PARAMETER_SHARE and flop_share <= _MOST_FLOP_SHARE * parameter_share:
            modules = tuple(flow.calls[flow.operators[layer.operators[0]].call].module for layer in chain)
            wide_chains.append(WideChain(modules, round(parameter_share, 6), round(flop_share, 6)))
    return tuple(wide_chains)


def _chains(flow: Dataflow, layers: dict[str, LinearLayer]) -> list[list[LinearLayer]]:
    """All linear layers, those in a row together."""
    layer_of_operator = {number: layer for layer in layers.values() for number in layer.operators}
    chains: list[list[LinearLayer]] = []
    for layer in layers.values():
        previous = _previous_layer(flow, layer_of_operator, layer)
        chain = next((chain for chain in chains if previous is not None and chain[-1] is previous), None)
        if chain is None:
            chains.append([layer])
        else:
            chain.append(layer)
    return chains


def _previous_layer(
    flow: Dataflow, layer_of_operator: dict[int, LinearLayer], layer: LinearLayer
) -> LinearLayer | None:
    """The layer whose output reaches this one through element-wise operators and views only; None if there is none or
    more than one."""
    todo = list(flow.operators[layer.operators[0]].inputs)
    seen = set(todo)
    previous: set[str] = set()
    while todo:
        producer = flow.values[todo.pop()].producer
        if producer is None:
            continue
        op = flow.operators[producer]
        if producer in layer_of_operator:
            previous.add(layer_of_operator[producer].parameter)
        elif torch.Tag.pointwise in op.func.tags or op.func.is_view or "dropout" in op.name or "bernoulli" in op.name:
            unseen = [value for value in op.inputs if value not in seen]
            seen.update(unseen)
            todo += unseen
        elif op.inputs and op.name != "empty_like":
            return None
    if len(previous) != 1:
        return None
    name = previous.pop()
    return next(other for other in layer_of_operator.values() if other.parameter == name)

"""Finds chains of a few linear layers that have many of a model's weights and do little of its work.

Splitting them over the replicate axis saves the all-reduce of their gradients. VGG16's classifier is an example.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.linear_layers import LinearLayer, find_linear_layers

# Chosen limits of the chains that are proposed. The simulator predicts whether splitting a chain is faster.
_LEAST_PARAMETER_SHARE = 0.05  # a chain has at least this share of the model's parameters
_MOST_FLOP_SHARE = 0.25  # a chain's share of the FLOPs is at most this fraction of its share of the parameters


@dataclass(frozen=True)
class WideChain:
    """Consecutive linear layers with only element-wise operators and views between them, and their shares of the
    model's parameters and FLOPs."""

    modules: tuple[str, ...]
    parameter_share: float
    flop_share: float


def find_wide_chains(flow: Dataflow, parameters: int, count: Callable[[str], int]) -> tuple[WideChain, ...]:
    """Returns the wide chains of a model with this number of `parameters`. `count` returns how many equal modules a
    traced module stands for (1 for most). A chain never includes a module that stands for several."""
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
    """Returns all linear layers, grouped into chains of consecutive layers (`_previous_layer`)."""
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
    """The layer whose output reaches this layer through element-wise operators and views only; None if there is no such
    layer or more than one."""
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

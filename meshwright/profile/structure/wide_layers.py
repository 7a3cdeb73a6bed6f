"""The few linear layers that hold much of a model's weights and do little of its work.

Splitting them over the replicate axis saves exchanging their gradients: VGG16's classifier is the known case.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from meshwright.profile.structure.dataflow import Flow
from meshwright.profile.structure.linears import Linear, find_linears

_SHARE = 0.05  # of the parameters, from which a chain is worth its own plan
_LESS = 0.25  # of that share, at most, is its share of the FLOPs


@dataclass(frozen=True)
class WideChain:
    """Linear layers in a row with only element-wise operators between; the shares are of the whole model's."""

    modules: tuple[str, ...]
    parameter_share: float
    flop_share: float


def find_wide_chains(flow: Flow, parameters: int, count: Callable[[str], int]) -> tuple[WideChain, ...]:
    """`count` says for how many equal modules a traced one stands."""
    linears = find_linears(flow)
    total = sum(op.flops * count(flow.calls[op.call].module) for op in flow.ops)
    found = []
    for chain in _chains(flow, linears):
        if any(count(linear.module) > 1 for linear in chain):
            continue
        weights = sum(linear.inputs * linear.outputs for linear in chain) / max(parameters, 1)
        flops = sum(flow.ops[number].flops for linear in chain for number in linear.ops) / max(total, 1)
        if weights >= _SHARE and flops <= _LESS * weights:
            modules = tuple(flow.calls[flow.ops[linear.ops[0]].call].module for linear in chain)
            found.append(WideChain(modules, round(weights, 6), round(flops, 6)))
    return tuple(found)


def _chains(flow: Flow, linears: dict[str, Linear]) -> list[list[Linear]]:
    made_by = {number: linear for linear in linears.values() for number in linear.ops}
    chains: list[list[Linear]] = []
    for linear in linears.values():
        before = _fed_by(flow, made_by, linear)
        chain = next((chain for chain in chains if before is not None and chain[-1] is before), None)
        if chain is None:
            chains.append([linear])
        else:
            chain.append(linear)
    return chains


def _fed_by(flow: Flow, made_by: dict[int, Linear], linear: Linear) -> Linear | None:
    """The layer whose output reaches this one through element-wise operators and views alone."""
    todo = list(flow.ops[linear.ops[0]].inputs)
    seen = set(todo)
    found: set[str] = set()
    while todo:
        made = flow.values[todo.pop()].op
        if made is None:
            continue
        op = flow.ops[made]
        if made in made_by:
            found.add(made_by[made].parameter)
        elif torch.Tag.pointwise in op.func.tags or op.func.is_view or "dropout" in op.name or "bernoulli" in op.name:
            fresh = [value for value in op.inputs if value not in seen]
            seen.update(fresh)
            todo += fresh
        elif op.inputs and op.name != "empty_like":
            return None
    if len(found) != 1:
        return None
    name = found.pop()
    return next(other for other in made_by.values() if other.parameter == name)

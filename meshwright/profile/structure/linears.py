"""The linear layers of a flow: every matrix product with a parameter, whichever module or function runs it."""

from dataclasses import dataclass

import torch

from meshwright.profile.structure.dataflow import Flow, Op, Ref

# What a weight may go through on its way into a product; autocast makes copies.
_CARRIES = ("t", "transpose", "expand", "unsqueeze", "view", "_unsafe_view", "permute", "alias", "_to_copy")


@dataclass(frozen=True)
class Linear:
    """A matrix product with a parameter. `ops` are its uses; `dim` is the parameter's dimension of output features."""

    parameter: str
    ops: tuple[int, ...]
    inputs: int
    outputs: int
    dim: int

    @property
    def module(self) -> str:
        return self.parameter.rpartition(".")[0]


def find_linears(flow: Flow) -> dict[str, Linear]:
    """By the name of their weight, in the order of their first use."""
    found: dict[str, Linear] = {}
    for number, op in enumerate(flow.ops):
        weight = _weight_of(flow, op)
        if weight is None:
            continue
        name, dim = weight
        inputs, outputs = flow.values[operands(op)[1]].shape[-2:]
        before = found.get(name)
        ops = (*before.ops, number) if before else (number,)
        found[name] = Linear(name, ops, inputs, outputs, dim)
    return found


def _weight_of(flow: Flow, op: Op) -> tuple[str, int] | None:
    """The parameter that the operator multiplies with from the right, and its dimension of output features."""
    if op.name not in ("mm", "addmm", "bmm", "baddbmm"):
        return None
    value, turned = operands(op)[1], False
    while (made := flow.values[value].op) is not None:
        maker = flow.ops[made]
        if maker.name not in _CARRIES:
            return None
        old, new = flow.values[maker.inputs[0]].shape, flow.values[value].shape
        if maker.name in ("t", "transpose", "permute"):
            turned = not turned
        elif old[-2:] != new[-2:]:
            return None
        value = maker.inputs[0]
    source = flow.values[value]
    if source.source != "parameter" or len(source.shape) != 2:
        return None
    return source.name, 0 if turned else 1


def operands(op: Op) -> tuple[int, int]:
    left, right = [arg.value for arg in op.args if isinstance(arg, Ref)][-2:]
    return left, right


def has_own_bias(flow: Flow, op: Op, linear: Linear) -> bool:
    """Whether what is added to the product comes from the layer's own module, so that it is divided with the weight."""
    added = [arg.value for arg in op.args if isinstance(arg, Ref)][:-2]
    owners = {name.rpartition(".")[0] for value in added for name in _held(flow, value)}
    return owners <= {linear.module} and (not added or bool(owners))


def _held(flow: Flow, value: int) -> set[str]:
    """The parameters and buffers that a value is computed of."""
    found: set[str] = set()
    todo, seen = [value], {value}
    while todo:
        source = flow.values[todo.pop()]
        if source.op is None:
            found.add(source.name)
        else:
            fresh = {*flow.ops[source.op].inputs, *flow.ops[source.op].mutated} - seen
            seen |= fresh
            todo += fresh
    return found


def tables(flow: Flow, linears: dict[str, Linear], value: int) -> list[str]:
    """The parameters that a value shows, looks rows up in, or is computed of element by element; the nearest first."""
    found: dict[str, None] = {}
    todo, seen = [value], {value}
    while todo:
        source = flow.values[todo.pop(0)]
        if source.source == "parameter" and source.name not in linears:
            found[source.name] = None
        elif source.op is not None and _keeps_elements(flow.ops[source.op]):
            fresh = [v for v in flow.ops[source.op].inputs if v not in seen]
            seen.update(fresh)
            todo += fresh
    return list(found)


def _keeps_elements(op: Op) -> bool:
    looks_up = op.name in ("embedding", "index", "clone", "_to_copy", "_unsafe_view")
    return looks_up or bool(op.func.is_view) or torch.Tag.pointwise in op.func.tags


def origins(flow: Flow, linears: dict[str, Linear], value: int) -> list[str]:
    """The linear layers that a value was last computed by."""
    by_op = {number: name for name, linear in linears.items() for number in linear.ops}
    found: dict[str, None] = {}
    todo, seen = [value], {value}
    while todo:
        made = flow.values[todo.pop()].op
        if made in by_op:
            found[by_op[made]] = None
        elif made is not None:
            fresh = [v for v in (*flow.ops[made].inputs, *flow.ops[made].mutated) if v not in seen]
            seen.update(fresh)
            todo += fresh
    return list(found)

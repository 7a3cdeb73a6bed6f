"""Finds the linear layers of a dataflow: all matrix products with a parameter, no matter which module or function runs
them."""

from dataclasses import dataclass

import torch

from meshwright.profile.structure.dataflow import Dataflow, TracedOperator, ValueRef

# Operators through which a weight may pass on its way into a matrix product; autocast makes copies.
_WEIGHT_VIEWS = ("t", "transpose", "expand", "unsqueeze", "view", "_unsafe_view", "permute", "alias", "_to_copy")


@dataclass(frozen=True)
class LinearLayer:
    """A two-dimensional parameter that is an operand of matrix products. `operators` are the numbers of these products,
    `inputs` and `outputs` are the numbers of features, and `dim` is the dimension of the parameter that has the output
    features."""

    parameter: str
    operators: tuple[int, ...]
    inputs: int
    outputs: int
    dim: int

    @property
    def module(self) -> str:
        """The module that the parameter belongs to."""
        return self.parameter.rpartition(".")[0]


def find_linear_layers(flow: Dataflow) -> dict[str, LinearLayer]:
    """Returns all linear layers by the name of their weight, in the order of their first use."""
    layers: dict[str, LinearLayer] = {}
    for number, op in enumerate(flow.operators):
        weight = _weight_of_product(flow, op)
        if weight is None:
            continue
        name, dim = weight
        inputs, outputs = flow.values[matmul_operands(op)[1]].shape[-2:]
        earlier = layers.get(name)
        operators = (*earlier.operators, number) if earlier else (number,)
        layers[name] = LinearLayer(name, operators, inputs, outputs, dim)
    return layers


def _weight_of_product(flow: Dataflow, op: TracedOperator) -> tuple[str, int] | None:
    """Returns the name of the parameter that is the right operand of a matrix product, and its dimension of output
    features. Returns None if the operator is no such product."""
    if op.name not in ("mm", "addmm", "bmm", "baddbmm"):
        return None
    value, is_transposed = matmul_operands(op)[1], False
    while (producer := flow.values[value].producer) is not None:
        view = flow.operators[producer]
        if view.name not in _WEIGHT_VIEWS:
            return None
        old_shape, new_shape = flow.values[view.inputs[0]].shape, flow.values[value].shape
        if view.name in ("t", "transpose", "permute"):
            is_transposed = not is_transposed
        elif old_shape[-2:] != new_shape[-2:]:
            return None
        value = view.inputs[0]
    source = flow.values[value]
    if source.source != "parameter" or len(source.shape) != 2:
        return None
    return source.name, 0 if is_transposed else 1


def matmul_operands(op: TracedOperator) -> tuple[int, int]:
    """The numbers of the two values that a matrix product multiplies: its last two tensor arguments, because the first
    argument of `addmm` and `baddbmm` is added."""
    left, right = [arg.value for arg in op.args if isinstance(arg, ValueRef)][-2:]
    return left, right


def has_bias_of_same_module(flow: Dataflow, op: TracedOperator, layer: LinearLayer) -> bool:
    """Whether everything that is added to the product belongs to the layer's own module and is therefore divided
    together with the weight. True also if nothing is added."""
    added = [arg.value for arg in op.args if isinstance(arg, ValueRef)][:-2]
    owners = {name.rpartition(".")[0] for value in added for name in _source_names(flow, value)}
    return owners <= {layer.module} and (not added or bool(owners))


def _source_names(flow: Dataflow, value: int) -> set[str]:
    """The names of all parameters, buffers and inputs that a value is computed from."""
    names: set[str] = set()
    todo, seen = [value], {value}
    while todo:
        source = flow.values[todo.pop()]
        if source.producer is None:
            names.add(source.name)
        else:
            op = flow.operators[source.producer]
            unseen = {*op.inputs, *op.overwritten} - seen
            seen |= unseen
            todo += unseen
    return names


def lookup_tables(flow: Dataflow, layers: dict[str, LinearLayer], value: int) -> list[str]:
    """Returns the names of the parameters from which only views, copies, lookups and element-wise operators lead to a
    value, the nearest first. Weights of linear layers are left out."""
    tables: dict[str, None] = {}
    todo, seen = [value], {value}
    while todo:
        current = flow.values[todo.pop(0)]
        if current.source == "parameter" and current.name not in layers:
            tables[current.name] = None
        elif current.producer is not None and _keeps_elements(flow.operators[current.producer]):
            unseen = [v for v in flow.operators[current.producer].inputs if v not in seen]
            seen.update(unseen)
            todo += unseen
    return list(tables)


def _keeps_elements(op: TracedOperator) -> bool:
    is_lookup_or_copy = op.name in ("embedding", "index", "clone", "_to_copy", "_unsafe_view")
    return is_lookup_or_copy or bool(op.func.is_view) or torch.Tag.pointwise in op.func.tags


def producing_layers(flow: Dataflow, layers: dict[str, LinearLayer], value: int) -> list[str]:
    """Returns the weights of the linear layers whose outputs a value is computed from, without another linear layer in
    between."""
    layer_of_operator = {number: name for name, layer in layers.items() for number in layer.operators}
    producers: dict[str, None] = {}
    todo, seen = [value], {value}
    while todo:
        producer = flow.values[todo.pop()].producer
        if producer in layer_of_operator:
            producers[layer_of_operator[producer]] = None
        elif producer is not None:
            op = flow.operators[producer]
            unseen = [v for v in (*op.inputs, *op.overwritten) if v not in seen]
            seen.update(unseen)
            todo += unseen
    return list(producers)

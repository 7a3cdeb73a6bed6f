"""Finds the inputs of an unedited model that hold sequences of tokens, and the attention that mixes their positions.

Ranks of the context axis divide these inputs by position; what the model computes from them is then divided, too
(`parallel/context/`). An input is divided if it is looked up in an embedding table, as tokens and types of tokens are,
or, in a model without such an input, if it holds features (batch, length, width). Other inputs, such as masks and
targets, stay whole, and each rank takes its part where they meet a divided tensor.
"""

from dataclasses import dataclass

from meshwright.profile.structure.dataflow import Dataflow, ValueRef


@dataclass(frozen=True)
class SequenceInput:
    """An argument of the model's forward function that holds sequences of `length` tokens in dimension `dim`."""

    name: str
    dim: int
    length: int


def find_sequence_inputs(flow: Dataflow) -> tuple[tuple[SequenceInput, ...], str]:
    """Returns the inputs that can be divided by position, and the reason if there are none: an empty text if there are
    some. `flow` is a forward pass of the model."""
    if not any(_is_attention(op.name) for op in flow.operators):
        return (), "the model computes no attention, which mixes the positions of a sequence"
    found = {value: None for value in map(flow.root, _lookups(flow)) if _is_input(flow, value, 2)}
    if not found:
        features = (value for op in flow.operators for value in map(flow.root, op.inputs))
        found = {value: None for value in features if _is_input(flow, value, 3) and _has_features(flow, value)}
    inputs = [flow.values[value] for value in found]
    if not inputs:
        return (), (
            "no input of the model holds sequences: neither is one looked up in an embedding table, nor has one the"
            " dimensions (batch, length, features)"
        )
    return tuple(
        SequenceInput(value.name, dim, value.shape[dim])
        for value in inputs
        for dim in [1 if value.dtype.is_floating_point else len(value.shape) - 1]
    ), ""


def _is_attention(name: str) -> bool:
    return "scaled_dot_product" in name or "softmax" in name


def _lookups(flow: Dataflow) -> list[int]:
    """The values that are looked up in embedding tables."""
    indices = [op.args[1] for op in flow.operators if op.name == "embedding"]
    return [index.value for index in indices if isinstance(index, ValueRef)]


def _is_input(flow: Dataflow, value: int, dims: int) -> bool:
    return flow.values[value].source == "input" and len(flow.values[value].shape) >= dims


def _has_features(flow: Dataflow, value: int) -> bool:
    return flow.values[value].dtype.is_floating_point and len(flow.values[value].shape) == 3

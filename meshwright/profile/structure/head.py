"""Finds the head of a model: the linear layer that computes its scores, one for each class or token of a vocabulary."""

from torch import nn

from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.linear_layers import find_linear_layers
from meshwright.profile.structure.vocabulary_splits import is_model_output


def find_head(model: nn.Module, flow: Dataflow) -> str | None:
    """Returns the name of the `nn.Linear` whose results are scores that the model returns, possibly reshaped or cast;
    of several ones, that with most outputs. None if the model has none that it calls once in a forward pass.
    `flow` is the dataflow of a forward pass of the model."""
    heads: dict[str, int] = {}
    for layer in find_linear_layers(flow).values():
        name = flow.calls[flow.operators[layer.operators[0]].call].module
        module = model.get_submodule(name) if name else model
        is_linear = isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
        if is_linear and is_model_output(flow, layer) and sum(call.module == name for call in flow.calls) == 1:
            heads[name] = layer.outputs
    return max(heads, key=lambda name: heads[name], default=None)

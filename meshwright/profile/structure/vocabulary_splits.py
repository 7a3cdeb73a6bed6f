"""Finds layers that can be split by vocabulary: embedding tables that the model's inputs index, and output layers with
one score per entry of the vocabulary."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.blocks.module_names import is_inside
from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.linear_layers import LinearLayer, find_linear_layers
from meshwright.profile.structure.splits import ParameterSplit, SplitGroup


def find_vocabulary_splits(flow: Dataflow, other_groups: tuple[SplitGroup, ...]) -> Iterator[SplitGroup]:
    """Yields the groups that are split by vocabulary. An embedding table and an output layer that share their weight
    are one group. Those that are in one of `other_groups` are skipped, because a weight is split in one way only."""
    used = {split.parameter for group in other_groups for split in group.splits}
    splits: dict[str, list[ParameterSplit]] = {}  # by parameter
    vocabulary_sizes: set[int] = set()
    for op in flow.operators:
        if op.name != "embedding" or flow.values[op.inputs[0]].source != "parameter":
            continue
        table = flow.values[op.inputs[0]]
        if not _is_model_input(flow, op.inputs[1]):
            continue
        vocabulary_sizes.add(table.shape[0])
        if table.name not in (*splits, *used):
            module = flow.calls[op.call].module
            splits[table.name] = [
                ParameterSplit(module, table.name, "vocabulary", 0, table.shape[0], module, communication="all_reduce")
            ]
    for name, layer in find_linear_layers(flow).items():
        is_wide = layer.outputs >= layer.inputs or layer.outputs in vocabulary_sizes
        if name in used or not is_wide or not is_model_output(flow, layer):
            continue
        module = flow.calls[flow.operators[layer.operators[0]].call].module
        output_layer = ParameterSplit(
            module,
            name,
            "vocabulary",
            layer.dim,
            layer.outputs,
            module,
            communication="all_gather or loss parallel",
        )
        splits.setdefault(name, []).append(output_layer)
    for name, members in splits.items():
        if _is_used_elsewhere(flow, name, members):
            continue
        group = members[0].group
        yield SplitGroup(group, members[0].size, tuple(replace(split, group=group) for split in members))


def _is_used_elsewhere(flow: Dataflow, parameter: str, members: list[ParameterSplit]) -> bool:
    """Whether code of a module computes with the weight in another way than these layers do: it would see one rank's
    rows as the whole weight."""
    layers = {split.module for split in members}
    return any(
        not any(not layer or is_inside(flow.calls[op.call].module, layer) for layer in layers)
        for op in flow.operators
        if any(flow.values[value].source == "parameter" and flow.values[value].name == parameter for value in op.inputs)
    )


def _is_model_input(flow: Dataflow, value: int) -> bool:
    """Whether a value is an input of the model, possibly reshaped or cast. Indices that the model computes are not:
    they are positions and the like."""
    while (producer := flow.values[value].producer) is not None:
        op = flow.operators[producer]
        if not op.func.is_view and op.name not in ("_to_copy", "clone"):
            return False
        value = op.inputs[0]
    return flow.values[value].source == "input"


def is_model_output(flow: Dataflow, layer: LinearLayer) -> bool:
    """Whether the layer's output is an output of the model, possibly reshaped, cast or with a bias added."""
    if len(layer.operators) != 1:
        return False
    product = layer.operators[0]
    reached = set(flow.operators[product].outputs)
    for op in flow.operators[product + 1 :]:
        if reached & set(op.inputs):
            adds_bias = op.name == "add" and any(flow.values[v].source == "parameter" for v in op.inputs)
            if op.name not in ("view", "_unsafe_view", "_to_copy", "detach", "alias", "clone") and not adds_bias:
                continue
            reached.update(op.outputs)
    return bool(reached & set(flow.outputs))

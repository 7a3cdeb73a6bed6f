"""Which operators and which tensors of a step are divided when a group of modules is split along the tensor axis.

The groups are followed in a forward pass that runs just what the recorded step runs, loss and precision included, so
the n-th operator here is the n-th one there. In backward an operator is divided with the one whose gradient it
computes, and what it returns is divided with what that one was given.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.profile.fake import fake_batch, fake_model
from meshwright.profile.operators import of_recomputing
from meshwright.profile.repeats import Run, left_out, shorten
from meshwright.profile.structure.dataflow import Flow, FlowRecorder, following
from meshwright.profile.structure.splits import splits_with_values
from meshwright.profile.structure.vocabulary import find_vocabulary

LOSS = "loss of "  # what is divided only where scores stay divided up to the loss
INTO = "into "  # what a group is given whole, also where everything around it is divided along the sequence


@dataclass(frozen=True)
class Marks:
    """Group names by the number of a forward operator: those that are divided, those whose result is, those that are
    given divided values, and the parameters that are."""

    operators: dict[int, str]
    results: dict[int, str]
    given: dict[int, str]
    parameters: dict[str, str]


def find_marks(
    model: nn.Module, sample: Any, run: Callable[[nn.Module, Any], Any], size: int, runs: tuple[Run, ...]
) -> Marks:
    flow = _flow_of_step(model, sample, run, size, runs)
    divided: dict[int, str] = {}
    parameters: dict[str, str] = {}
    heads: dict[int, str] = {}
    groups = splits_with_values(flow)
    for group, values in groups:
        divided.update(dict.fromkeys(values, group.name))
        parameters.update({split.parameter: group.name for split in group.splits})
    for group in find_vocabulary(flow, tuple(group for group, _ in groups)):
        parameters.update({split.parameter: group.name for split in group.splits})
        for split in group.splits:
            products, scores = _scores(flow, split.parameter, split.size)
            heads.update(dict.fromkeys(products, group.name))
            divided.update(dict.fromkeys(scores, f"{LOSS}{group.name}"))
    whole: dict[int, str] = {}
    for op in flow.ops:
        into = next((divided[value] for value in op.outputs if value in divided), None)
        if into and "mm" in op.name and not any(value in divided for value in op.inputs):
            whole.update({flow.root(value): into for value in op.inputs if not _sources(flow, value)})
    # What autocast made of a divided weight is divided with it.
    for op in flow.ops:
        name = next((divided[value] for value in (*op.outputs, *op.inputs) if value in divided), None)
        copies = [flow.root(value) for value in op.inputs if name and "mm" in op.name and _sources(flow, value)]
        divided.update({value: parameters[p] for value in copies for p in _sources(flow, value) if p in parameters})
    kept = [number for number, op in enumerate(flow.ops) if not of_recomputing(op.name, op.args)]
    operators, results, given = {}, {}, {}
    for place, number in enumerate(kept):
        op = flow.ops[number]
        inputs = next((divided[value] for value in op.inputs if value in divided), None)
        outputs = next((divided[value] for value in op.outputs if value in divided), None)
        if inputs:
            given[place] = inputs
        feeds = next((name for value in op.outputs for name in (whole.get(value),) if name), None)
        if outputs or feeds:
            results[place] = outputs or f"{INTO}{feeds}"
        if name := heads.get(number) or outputs or inputs:
            operators[place] = name
    return Marks(operators, results, given, parameters)


def _flow_of_step(
    model: nn.Module, sample: Any, run: Callable[[nn.Module, Any], Any], size: int, runs: tuple[Run, ...]
) -> Flow:
    mode = FakeTensorMode()
    twin = fake_model(model, mode, left_out(runs))
    names = {module: name for name, module in twin.named_modules()}
    recorder = FlowRecorder()
    for name, parameter in twin.named_parameters():
        recorder.know(parameter, "parameter", name)
    shorten(twin, runs)
    batch = fake_batch(sample, size, mode)
    recorder.know_all(batch, "input")
    with mode, recorder, following(names, recorder):
        recorder.enter("", (), {})  # the loss is computed outside of every module
        recorder.leave(run(twin, batch))
    flow = recorder.flow
    flow.calls[0].outputs = flow.calls[1].outputs  # the model's, not the loss
    return flow


def _scores(flow: Flow, weight: str, size: int) -> tuple[set[int], set[int]]:
    """The operators that compute the scores of a head, and the scores with what is computed of them one by one until
    they are summed up."""
    products: set[int] = set()
    scores: set[int] = set()
    for number, op in enumerate(flow.ops):
        product = "mm" in op.name and any(weight in _sources(flow, value) for value in op.inputs)
        if product:
            products.add(number)
        if product or any(value in scores for value in op.inputs):
            shapes = {value: flow.values[value].shape for value in op.outputs}
            scores.update(value for value, shape in shapes.items() if size in shape and prod(shape) > size)
    return products, scores


def _sources(flow: Flow, value: int) -> set[str]:
    """The parameter that a value shows, if it does."""
    while (made := flow.values[value].op) is not None:
        op = flow.ops[made]
        if not op.func.is_view and op.name not in ("_to_copy", "_unsafe_view"):
            return set()
        value = op.inputs[0]
    return {flow.values[value].name} if flow.values[value].source == "parameter" else set()

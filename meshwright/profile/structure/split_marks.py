"""Which operators and tensors of a training step are divided when a group of modules is split along the tensor axis.

The groups are followed through a recorded forward pass that runs exactly the operators of the traced step, including
loss and precision. Therefore operator n of this forward pass is operator n of the step. In the backward pass, an
operator is divided if the forward operator whose gradient it computes is divided, and its result is divided if the
inputs of that forward operator are divided.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from meshwright.errors import InputError
from meshwright.profile.equal_blocks import EqualBlocks, remove_skipped_blocks, skipped_blocks
from meshwright.profile.fake import FakeRules, fake_batch, fake_model
from meshwright.profile.operator_costs import is_checkpoint_artifact
from meshwright.profile.structure.dataflow import Dataflow, DataflowRecorder, TracedOperator, recording_module_calls
from meshwright.profile.structure.splits import find_splits_with_values
from meshwright.profile.structure.vocabulary_splits import find_vocabulary_splits
from meshwright.profile.torch_private import FakeTensorMode
from meshwright.profile.values import SplitMark
from meshwright.user.code import first_line


@dataclass(frozen=True)
class SplitMarks:
    """The `SplitMark`s of a training step. Three dicts are indexed by the number of a forward operator: `operators` has
    the mark of the operator itself, `results` of its result, `inputs` of its inputs. `parameters` is indexed by
    parameter name. Operators, tensors and parameters that no split divides are missing."""

    operators: dict[int, SplitMark]
    results: dict[int, SplitMark]
    inputs: dict[int, SplitMark]
    parameters: dict[str, SplitMark]


def find_split_marks(
    model: nn.Module,
    sample: Any,
    run: Callable[[nn.Module, Any], Any],
    size: int,
    equal_blocks: tuple[EqualBlocks, ...],
) -> SplitMarks:
    """Returns the marks of a step with `size` samples. `run(model, batch)` computes the loss."""
    flow = _record_dataflow_of_step(model, sample, run, size, equal_blocks)
    divided: dict[int, SplitMark] = {}  # by value
    parameters: dict[str, SplitMark] = {}
    heads: dict[int, SplitMark] = {}  # by operator: the matrix products of output layers
    groups = find_splits_with_values(flow)
    for group, values in groups:
        mark = SplitMark(group.name)
        divided.update(dict.fromkeys(values, mark))
        parameters.update({split.parameter: mark for split in group.splits})
    for group in find_vocabulary_splits(flow, tuple(group for group, _ in groups)):
        mark = SplitMark(group.name)
        parameters.update({split.parameter: mark for split in group.splits})
        for split in group.splits:
            products, scores = _scores(flow, split.parameter, split.size)
            heads.update(dict.fromkeys(products, mark))
            divided.update(dict.fromkeys(scores, SplitMark(group.name, "divided_with_loss")))
    whole_inputs = _whole_inputs(flow, divided)
    _mark_weight_copies(flow, divided, parameters)
    return _marks_by_operator(flow, divided, parameters, heads, whole_inputs)


def _whole_inputs(flow: Dataflow, divided: dict[int, SplitMark]) -> dict[int, SplitMark]:
    """Returns the values that every rank needs in full because a matrix product with a divided result reads them, by
    their root (`Dataflow.root`), with the mark of that result. Weights are left out."""
    whole: dict[int, SplitMark] = {}
    for op in flow.operators:
        mark = _first_mark(divided, op.outputs)
        if mark and "mm" in op.name and not any(value in divided for value in op.inputs):
            whole.update({flow.root(value): mark for value in op.inputs if not _shown_parameter(flow, value)})
    return whole


def _mark_weight_copies(flow: Dataflow, divided: dict[int, SplitMark], parameters: dict[str, SplitMark]) -> None:
    """Adds the copies that autocast makes of divided weights to `divided`, with the mark of the weight."""
    for op in flow.operators:
        mark = _first_mark(divided, (*op.outputs, *op.inputs))
        if not mark or "mm" not in op.name:
            continue
        copies = [(flow.root(value), name) for value in op.inputs if (name := _shown_parameter(flow, value))]
        divided.update({value: parameters[name] for value, name in copies if name in parameters})


def _marks_by_operator(
    flow: Dataflow,
    divided: dict[int, SplitMark],
    parameters: dict[str, SplitMark],
    heads: dict[int, SplitMark],
    whole_inputs: dict[int, SplitMark],
) -> SplitMarks:
    marks = SplitMarks({}, {}, {}, parameters)
    counted = [number for number, op in enumerate(flow.operators) if not is_checkpoint_artifact(op.name, op.args)]
    for index, number in enumerate(counted):
        op: TracedOperator = flow.operators[number]
        inputs, outputs = _first_mark(divided, op.inputs), _first_mark(divided, op.outputs)
        feeds = _first_mark(whole_inputs, op.outputs)
        if inputs:
            marks.inputs[index] = inputs
        if outputs:
            marks.results[index] = outputs
        elif feeds and feeds.part == "divided":
            marks.results[index] = SplitMark(feeds.group, "whole_input")
        if mark := heads.get(number) or outputs or inputs:
            marks.operators[index] = mark
    return marks


def _first_mark(marks: dict[int, SplitMark], values: tuple[int, ...]) -> SplitMark | None:
    return next((marks[value] for value in values if value in marks), None)


def _record_dataflow_of_step(
    model: nn.Module,
    sample: Any,
    run: Callable[[nn.Module, Any], Any],
    size: int,
    equal_blocks: tuple[EqualBlocks, ...],
) -> Dataflow:
    """Returns the dataflow of the forward pass including the loss."""
    mode = FakeTensorMode()
    fake = fake_model(model, mode, skipped_blocks(equal_blocks), size)
    names = {module: name for name, module in fake.named_modules()}
    recorder = DataflowRecorder()
    for name, parameter in fake.named_parameters():
        recorder.register(parameter, "parameter", name)
    remove_skipped_blocks(fake, equal_blocks)
    batch = fake_batch(sample, size, mode)
    recorder.register_all(batch, "input")
    try:
        with mode, FakeRules(), recorder, recording_module_calls(names, recorder):
            recorder.enter("", (), {})  # the loss is computed outside of every module
            recorder.leave(run(fake, batch))
    except InputError:
        raise
    except Exception as error:
        raise InputError(f"the model cannot be traced: {first_line(error)}") from error
    flow = recorder.flow
    flow.calls[0].outputs = flow.calls[1].outputs  # the outputs of the model, not the loss
    return flow


def _scores(flow: Dataflow, weight: str, size: int) -> tuple[set[int], set[int]]:
    """Returns the operators that multiply with the weight of an output layer, and the values with one element per
    score: the scores themselves and values of that size that are computed from them."""
    products: set[int] = set()
    scores: set[int] = set()
    for number, op in enumerate(flow.operators):
        is_product = "mm" in op.name and any(weight == _shown_parameter(flow, value) for value in op.inputs)
        if is_product:
            products.add(number)
        if is_product or any(value in scores for value in op.inputs):
            shapes = {value: flow.values[value].shape for value in op.outputs}
            scores.update(value for value, shape in shapes.items() if size in shape and prod(shape) > size)
    return products, scores


def _shown_parameter(flow: Dataflow, value: int) -> str:
    """The name of the parameter of which the value is a view or a copy in another dtype; empty if the value is
    neither."""
    while (producer := flow.values[value].producer) is not None:
        op = flow.operators[producer]
        if not op.func.is_view and op.name not in ("_to_copy", "_unsafe_view"):
            return ""
        value = op.inputs[0]
    return flow.values[value].name if flow.values[value].source == "parameter" else ""

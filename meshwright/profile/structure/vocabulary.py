"""Splits by vocabulary: tables that the model's own inputs look up, and the output layers onto as many scores."""

from collections.abc import Iterator
from dataclasses import replace

from meshwright.profile.structure.dataflow import Flow
from meshwright.profile.structure.linears import Linear, find_linears
from meshwright.profile.structure.splits import Split, SplitGroup


def find_vocabulary(flow: Flow, others: tuple[SplitGroup, ...]) -> Iterator[SplitGroup]:
    """Tied tables and heads are one group. What is in one of the `others` is left out."""
    linears = find_linears(flow)
    taken = {split.parameter for group in others for split in group.splits}
    splits: dict[str, list[Split]] = {}
    rows: set[int] = set()
    for op in flow.ops:
        if op.name != "embedding" or flow.values[op.inputs[0]].source != "parameter":
            continue
        table = flow.values[op.inputs[0]]
        if _reads_input(flow, op.inputs[1]) and table.name not in splits:
            rows.add(table.shape[0])
            module = flow.calls[op.call].module
            splits[table.name] = [
                Split(module, table.name, "vocabulary", 0, table.shape[0], module, crosses="all_reduce")
            ]
    for name, linear in linears.items():
        wide = linear.outputs >= linear.inputs or linear.outputs in rows
        if name in taken or not wide or not _is_output(flow, linear):
            continue
        module = flow.calls[flow.ops[linear.ops[0]].call].module
        head = Split(
            module, name, "vocabulary", linear.dim, linear.outputs, module, crosses="all_gather or loss parallel"
        )
        splits.setdefault(name, []).append(head)
    for members in splits.values():
        group = members[0].group
        yield SplitGroup(group, members[0].size, tuple(replace(split, group=group) for split in members))


def _reads_input(flow: Flow, value: int) -> bool:
    """Whether the indices are the model's input, at most reshaped or cast: computed ones are positions and the like."""
    while (made := flow.values[value].op) is not None:
        op = flow.ops[made]
        if not op.func.is_view and op.name not in ("_to_copy", "clone"):
            return False
        value = op.inputs[0]
    return flow.values[value].source == "input"


def _is_output(flow: Flow, linear: Linear) -> bool:
    """Whether the layer's output, at most reshaped, cast or biased, is the model's."""
    if len(linear.ops) != 1:
        return False
    reached = set(flow.ops[linear.ops[0]].outputs)
    for op in flow.ops[linear.ops[0] + 1 :]:
        if reached & set(op.inputs):
            biased = op.name == "add" and any(flow.values[v].source == "parameter" for v in op.inputs)
            if op.name not in ("view", "_unsafe_view", "_to_copy", "detach", "alias", "clone") and not biased:
                continue
            reached.update(op.outputs)
    return bool(reached & set(flow.outputs))

"""The linear layers of a flow: every matrix product with a parameter, whichever module or function runs it."""

from dataclasses import dataclass

from meshwright.profile.dataflow import Flow, Op, Ref


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
        if maker.name not in ("t", "transpose", "expand", "unsqueeze", "view", "_unsafe_view", "permute", "alias"):
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

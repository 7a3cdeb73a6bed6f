"""The pieces that pipeline stages and branches are made of: module calls that are never divided further, in the order
in which they run.

Three kinds of module calls are divided into the calls inside of them: the model itself; a module that only passes each
child's result to the next child (as `nn.Sequential` does); and a module that contains several blocks, or has most of
its parameters in chains (`ModuleList`, `Sequential`, `ModuleDict`). Every other call is one piece. A block is a module
whose parent has several children of the same type (`block_types`). A block is one piece, unless it only passes the
result of each child to the next.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from meshwright.profile.structure.dataflow import Dataflow, TracedOperator

_CHAINS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _contains_chain(model: nn.Module, name: str, blocks: frozenset[type[nn.Module]]) -> bool:
    """Whether the module contains several blocks, or has most of its parameters in chains. True for the model itself
    (empty `name`), False for a block. `blocks` are the types of blocks."""
    module = model.get_submodule(name)
    if not name or type(module) in blocks:
        return not name
    chains = [child for child in module.modules() if isinstance(child, _CHAINS) and child is not module]
    if any(sum(type(child) in blocks and _has_children(child) for child in chain.children()) > 1 for chain in chains):
        return True
    total = sum(parameter.numel() for parameter in module.parameters())
    in_chains = {id(p): p.numel() for chain in chains for p in chain.parameters()}
    return 2 * sum(in_chains.values()) > total


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def block_types(model: nn.Module) -> frozenset[type[nn.Module]]:
    """Returns the types of modules that count as blocks: those of which a chain (`ModuleList`, `Sequential`,
    `ModuleDict`) has at least two children, or any other module at least three (two may be towers, or an encoder and a
    decoder). Plain `nn.Sequential` children are not counted."""
    types: set[type[nn.Module]] = set()
    for module in model.modules():
        fewest = 2 if isinstance(module, _CHAINS) else 3
        counts = Counter(type(child) for child in module.children() if not _is_plain_sequential(child))
        types.update(child_type for child_type, count in counts.items() if count >= fewest)
    return frozenset(types)


def _is_plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


@dataclass
class ModulePieces:
    """The pieces of a dataflow, numbered in the order in which they run; `calls` are the numbers of their module calls.
    Unless said otherwise, a value is given by its root (`Dataflow.root`), so all views of one tensor are one value. The
    lists `piece_of_operator` and `operator_inputs` are indexed by operator, all other lists by piece."""

    flow: Dataflow
    calls: tuple[int, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The name of each piece's module."""
        return tuple(self.flow.calls[call].module for call in self.calls)

    @cached_property
    def piece_of_operator(self) -> list[int]:
        """For each operator, the piece that it ran in. It is -1 for operators between pieces, which run in the forward
        function of a module that is divided into pieces."""
        pieces = [-1] * len(self.flow.operators)
        for piece, call in enumerate(self.calls):
            begin, end = self.flow.calls[call].begin, self.flow.calls[call].end
            pieces[begin:end] = [piece] * (end - begin)
        return pieces

    @cached_property
    def last_derivative(self) -> int:
        """The number of the last operator between pieces that ran in a backward pass; -1 if there is none."""
        numbers = (number for number, op in enumerate(self.flow.operators) if op.in_backward)
        return max((number for number in numbers if self.piece_of_operator[number] < 0), default=-1)

    @cached_property
    def operator_inputs(self) -> list[tuple[int, ...]]:
        """For each operator, the roots of the values that it reads or overwrites."""
        root = self.flow.root
        return [tuple(dict.fromkeys(root(v) for v in (*op.inputs, *op.overwritten))) for op in self.flow.operators]

    @cached_property
    def inputs_by_root(self) -> list[dict[int, int]]:
        """For each piece, the values that it is called with, as {root: value}."""
        return [{self.flow.root(v): v for v in self.flow.calls[call].inputs} for call in self.calls]

    @cached_property
    def outputs_by_root(self) -> list[dict[int, int]]:
        """For each piece, the values that it returns, as {root: value}."""
        return [{self.flow.root(v): v for v in self.flow.calls[call].outputs} for call in self.calls]

    @cached_property
    def model_outputs(self) -> frozenset[int]:
        """The roots of the values that the model returns."""
        return frozenset(self.flow.root(v) for v in self.flow.outputs)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """For each value, the operators other than views that read or overwrite it, in order. Values without such
        operators are missing."""
        users: dict[int, list[int]] = {}
        for number, op in enumerate(self.flow.operators):
            if not is_view(op):
                for value in self.operator_inputs[number]:
                    users.setdefault(value, []).append(number)
        return users

    @cached_property
    def depends_on_weights(self) -> dict[int, bool]:
        """For each value, whether it depends on a parameter or on random numbers. If it does, another rank cannot
        compute it from the model's inputs."""
        return self._dependencies_of_values[0]

    @cached_property
    def model_inputs(self) -> dict[int, frozenset[str]]:
        """For each value, the names of the model's inputs that it depends on."""
        return self._dependencies_of_values[1]

    @cached_property
    def _dependencies_of_values(self) -> tuple[dict[int, bool], dict[int, frozenset[str]]]:
        on_weights: dict[int, bool] = {}
        inputs: dict[int, frozenset[str]] = {}
        for number, value in enumerate(self.flow.values):
            if value.producer is None:
                on_weights[number] = value.source == "parameter"
                inputs[number] = frozenset((value.name,) if value.source == "input" else ())
        for number, op in enumerate(self.flow.operators):
            values = self.operator_inputs[number]
            from_weights = any(on_weights[v] for v in values) or is_random(op)
            from_inputs = frozenset().union(*(inputs[v] for v in values))
            for output in {*op.outputs, *op.replacements}:
                if self.flow.values[output].producer == number:
                    on_weights[output], inputs[output] = from_weights, from_inputs
        return on_weights, inputs

    @cached_property
    def holds_parameters(self) -> list[bool]:
        """For each piece, whether one of its operators uses a parameter."""
        uses_parameter = [False] * len(self.calls)
        for number, piece in enumerate(self.piece_of_operator):
            if piece >= 0 and any(self.flow.values[v].source == "parameter" for v in self.operator_inputs[number]):
                uses_parameter[piece] = True
        return uses_parameter

    @cached_property
    def dependencies(self) -> list[set[int]]:
        """For each piece, the earlier pieces whose results it uses, directly or through operators between pieces."""
        origins: dict[int, frozenset[int]] = {}  # by value, the pieces whose results the value was computed from
        dependencies: list[set[int]] = [set() for _ in self.calls]
        for number, op in enumerate(self.flow.operators):
            piece = self.piece_of_operator[number]
            sources = frozenset().union(*(origins.get(v, frozenset()) for v in self.operator_inputs[number]))
            if piece >= 0:
                dependencies[piece] |= sources - {piece}
            for output in {*op.outputs, *op.replacements}:
                if self.flow.values[output].producer == number:
                    origins[output] = sources if piece < 0 else frozenset((piece,))
        return dependencies


def is_random(op: TracedOperator) -> bool:
    """Whether the operator draws random numbers."""
    return torch.Tag.nondeterministic_seeded in op.func.tags


def is_view(op: TracedOperator) -> bool:
    """Whether the operator returns a view of its input and writes nothing."""
    return bool(op.func.is_view) and not op.replacements


def find_pieces(model: nn.Module, flow: Dataflow) -> ModulePieces:
    """Divides a model into pieces, given the dataflow of its forward pass."""
    blocks = block_types(model)
    children: dict[int, list[int]] = {}
    for number, call in enumerate(flow.calls):
        children.setdefault(call.parent, []).append(number)

    def pieces_of(number: int) -> list[int]:
        inner_calls = children.get(number, [])
        if not inner_calls:
            return [number] if number else []
        if _only_passes_results_on(flow, number, inner_calls) or _contains_chain(
            model, flow.calls[number].module, blocks
        ):
            return [piece for child in inner_calls for piece in pieces_of(child)]
        return [number]

    return ModulePieces(flow, tuple(pieces_of(0)))


def _only_passes_results_on(flow: Dataflow, number: int, children: list[int]) -> bool:
    """Whether the call runs no operator other than views outside of its `children`, each child uses only values that
    the previous child returned, and the call returns only values that the last child returned."""
    call = flow.calls[number]
    in_children = {op for child in children for op in range(flow.calls[child].begin, flow.calls[child].end)}
    if any(op not in in_children and not is_view(flow.operators[op]) for op in range(call.begin, call.end)):
        return False
    returned: set[int] | None = None
    for child in children:
        begin, end = flow.calls[child].begin, flow.calls[child].end
        used = {flow.root(v) for op in flow.operators[begin:end] for v in op.inputs}
        from_outside = {v for v in used if _exists_before(flow, v, begin)}
        if returned is not None and not from_outside <= returned:
            return False
        returned = {flow.root(v) for v in flow.calls[child].outputs}
    return returned is None or {flow.root(v) for v in call.outputs} <= returned


def _exists_before(flow: Dataflow, number: int, begin: int) -> bool:
    """Whether a value existed before operator `begin`, with which a module call begins. False for parameters and
    buffers, because a module owns them rather than receiving them."""
    value = flow.values[number]
    return value.source == "input" if value.producer is None else value.producer < begin

"""What a model is made of for cutting: the module calls that are never taken apart, in the order they run.

The model itself is taken apart, a module that only hands each child's result to the next (as `nn.Sequential` does),
and a module that holds a chain of blocks or is mostly chains (`ModuleList`, `Sequential`). A block, that is a module
of a kind that comes in numbers, is not, unless it only hands results on.
"""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from meshwright.profile.structure.dataflow import Flow, Op

_CHAINS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def _holds_chain(model: nn.Module, name: str, blocks: frozenset[type[nn.Module]]) -> bool:
    module = model.get_submodule(name)
    if not name or type(module) in blocks:
        return not name
    chains = [child for child in module.modules() if isinstance(child, _CHAINS) and child is not module]
    if any(sum(type(child) in blocks and _has_children(child) for child in chain.children()) > 1 for chain in chains):
        return True
    whole = sum(parameter.numel() for parameter in module.parameters())
    held = {id(p): p.numel() for chain in chains for p in chain.parameters()}
    return 2 * sum(held.values()) > whole


def _has_children(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def kinds_of_blocks(model: nn.Module) -> frozenset[type[nn.Module]]:
    """The kinds of which a chain holds several, or any module three or more (two may be towers, or an encoder and a
    decoder)."""
    found: set[type[nn.Module]] = set()
    for module in model.modules():
        least = 2 if isinstance(module, _CHAINS) else 3
        kinds = Counter(type(child) for child in module.children() if not _plain_sequential(child))
        found.update(kind for kind, count in kinds.items() if count >= least)
    return frozenset(found)


def _plain_sequential(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


@dataclass
class Pieces:
    """The flow seen as pieces: `calls` are their calls in order. Values are followed by their memory (`Flow.root`)."""

    flow: Flow
    calls: tuple[int, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.flow.calls[call].module for call in self.calls)

    @cached_property
    def of_op(self) -> list[int]:
        """The piece that each operator ran in; -1 for those that a divided module's own forward pass runs."""
        found = [-1] * len(self.flow.ops)
        for piece, call in enumerate(self.calls):
            begin, end = self.flow.calls[call].begin, self.flow.calls[call].end
            found[begin:end] = [piece] * (end - begin)
        return found

    @cached_property
    def inputs_of_op(self) -> list[tuple[int, ...]]:
        root = self.flow.root
        return [tuple(dict.fromkeys(root(v) for v in (*op.inputs, *op.mutated))) for op in self.flow.ops]

    @cached_property
    def arguments(self) -> list[dict[int, int]]:
        """Of each piece, what it is called with: by memory, the value as it is passed."""
        return [{self.flow.root(v): v for v in self.flow.calls[call].inputs} for call in self.calls]

    @cached_property
    def outputs(self) -> list[dict[int, int]]:
        return [{self.flow.root(v): v for v in self.flow.calls[call].outputs} for call in self.calls]

    @cached_property
    def model_outputs(self) -> frozenset[int]:
        return frozenset(self.flow.root(v) for v in self.flow.outputs)

    @cached_property
    def users(self) -> dict[int, list[int]]:
        """Of each value, the operators outside of views that use it, in order."""
        found: dict[int, list[int]] = {}
        for number, op in enumerate(self.flow.ops):
            if not is_view(op):
                for value in self.inputs_of_op[number]:
                    found.setdefault(value, []).append(number)
        return found

    @cached_property
    def trained(self) -> dict[int, bool]:
        """Whether a value depends on a parameter or on chance, so that no other rank could compute it by itself."""
        return self._inherited()[0]

    @cached_property
    def model_inputs(self) -> dict[int, frozenset[str]]:
        """The model's inputs that a value depends on."""
        return self._inherited()[1]

    def _inherited(self) -> tuple[dict[int, bool], dict[int, frozenset[str]]]:
        trained: dict[int, bool] = {}
        inputs: dict[int, frozenset[str]] = {}
        for number, value in enumerate(self.flow.values):
            if value.op is None:
                trained[number] = value.source == "parameter"
                inputs[number] = frozenset((value.name,) if value.source == "input" else ())
        for number, op in enumerate(self.flow.ops):
            values = self.inputs_of_op[number]
            from_weights = any(trained[v] for v in values) or is_random(op)
            from_inputs = frozenset().union(*(inputs[v] for v in values))
            for made in {*op.outputs, *op.rewritten}:
                if self.flow.values[made].op == number:
                    trained[made], inputs[made] = from_weights, from_inputs
        return trained, inputs

    @cached_property
    def holds_parameters(self) -> list[bool]:
        found = [False] * len(self.calls)
        for number, piece in enumerate(self.of_op):
            if piece >= 0 and any(self.flow.values[v].source == "parameter" for v in self.inputs_of_op[number]):
                found[piece] = True
        return found

    @cached_property
    def needs(self) -> list[set[int]]:
        """Of each piece, the earlier pieces whose results it uses, also through what a forward pass does between."""
        made_by: dict[int, frozenset[int]] = {}
        found: list[set[int]] = [set() for _ in self.calls]
        for number, op in enumerate(self.flow.ops):
            piece = self.of_op[number]
            before = frozenset().union(*(made_by.get(v, frozenset()) for v in self.inputs_of_op[number]))
            if piece >= 0:
                found[piece] |= before - {piece}
            for made in {*op.outputs, *op.rewritten}:
                if self.flow.values[made].op == number:
                    made_by[made] = before if piece < 0 else frozenset((piece,))
        return found


def is_random(op: Op) -> bool:
    return torch.Tag.nondeterministic_seeded in op.func.tags


def is_view(op: Op) -> bool:
    return bool(op.func.is_view) and not op.rewritten


def find_pieces(model: nn.Module, flow: Flow) -> Pieces:
    blocks = kinds_of_blocks(model)
    children: dict[int, list[int]] = {}
    for number, call in enumerate(flow.calls):
        children.setdefault(call.parent, []).append(number)

    def within(number: int) -> list[int]:
        inside = children.get(number, [])
        if not inside:
            return [number] if number else []
        if _hands_on(flow, number, inside) or _holds_chain(model, flow.calls[number].module, blocks):
            return [piece for child in inside for piece in within(child)]
        return [number]

    return Pieces(flow, tuple(within(0)))


def _hands_on(flow: Flow, number: int, children: list[int]) -> bool:
    """Whether the call does nothing itself, and each child uses what the one before returned and nothing else."""
    call = flow.calls[number]
    inside = {op for child in children for op in range(flow.calls[child].begin, flow.calls[child].end)}
    if any(op not in inside and not is_view(flow.ops[op]) for op in range(call.begin, call.end)):
        return False
    returned: set[int] | None = None
    for child in children:
        begin, end = flow.calls[child].begin, flow.calls[child].end
        used = {flow.root(v) for op in flow.ops[begin:end] for v in op.inputs}
        brought = {v for v in used if _made_before(flow, v, begin)}
        if returned is not None and not brought <= returned:
            return False
        returned = {flow.root(v) for v in flow.calls[child].outputs}
    return returned is None or {flow.root(v) for v in call.outputs} <= returned


def _made_before(flow: Flow, value: int, begin: int) -> bool:
    """Parameters and buffers a module has anyway."""
    found = flow.values[value]
    return found.source == "input" if found.op is None else found.op < begin

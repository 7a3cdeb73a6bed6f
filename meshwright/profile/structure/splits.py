"""Decides which linear layers can be split along the tensor axis, which of them must be split together, into how many
parts, and which communication the split needs. The rule of every single operator is in `split_rules.py`.

A group of layers that are split together starts at a linear layer whose output features are divided among ranks
(`column`). The divided dimension is followed from operator to operator, as long as every rank can compute its part of
the output from its parts of the inputs, until linear layers sum over it (`row`). Every other value that an operator
combines with the divided value must be divided in the same way. Its layer therefore joins the group: gate layers where
they are multiplied, queries, keys and values at attention, and tables with one entry per head (a bias by relative
position). If the divided dimension ends anywhere else, the layer is not split.

`vocabulary_splits.py` finds the layers that are split by vocabulary. `transformers_plans.py` adds the splits that the
transformers library publishes for its models.
"""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import gcd
from typing import Literal

from meshwright.profile.structure.dataflow import Dataflow, TracedOperator
from meshwright.profile.structure.linear_layers import (
    LinearLayer,
    find_linear_layers,
    has_bias_of_same_module,
    lookup_tables,
    matmul_operands,
    producing_layers,
)
from meshwright.profile.structure.split_rules import CannotSplit, DividedDimension, NeedsDividedInput, propagate_split

SplitKind = Literal["column", "row", "heads", "vocabulary"]
SplitSource = Literal["derived", "published"]
_SLICED = 0  # for a fused layer whose parts are the slices, of any size, that the model takes of its output
_FUSED_PARTS = (1, 2, 3, _SLICED)  # numbers of equal parts to try for a layer (3: fused queries, keys, values)


@dataclass(frozen=True)
class ParameterSplit:
    """How one parameter is split: the `size` elements of its dimension `dim` are divided among ranks.

    `group` is the name of the `SplitGroup`. `parts` are the sizes of the parts of a fused layer, each of which is
    divided among the ranks separately; it is empty for other layers. `communication` is the collective that follows the
    module in the forward pass, empty if none does: it is shown and predicted, and parallel/tensor/products.py calls it
    by rules of its own. `source` is `published` if the split comes from the model's own
    tensor-parallel plan.
    """

    module: str
    parameter: str
    kind: SplitKind
    dim: int
    size: int
    group: str
    parts: tuple[int, ...] = ()
    communication: str = ""
    source: SplitSource = "derived"


@dataclass(frozen=True)
class SplitGroup:
    """Parameters that are split together or not at all. The number of ranks must divide `degree`, except for groups
    that are split by vocabulary, whose parts may be uneven. `heads` and `kv_heads` are the numbers of attention heads
    and of key-value heads, None for layers other than attention."""

    name: str
    degree: int
    splits: tuple[ParameterSplit, ...]
    heads: int | None = None
    kv_heads: int | None = None


def find_splits(flow: Dataflow) -> tuple[SplitGroup, ...]:
    """Returns all groups of column and row layers, including attention split by heads, in the order of their first
    layer."""
    return tuple(group for group, _ in find_splits_with_values(flow))


def find_splits_with_values(flow: Dataflow) -> tuple[tuple[SplitGroup, frozenset[int]], ...]:
    """Returns the groups of `find_splits`, each with the numbers of the values that are divided if the group is
    split."""
    search = _SplitSearch(flow, find_linear_layers(flow))
    groups: list[tuple[SplitGroup, frozenset[int]]] = []
    for name in search.layers:
        candidate = None if name in search.used else _group_from(search, name)
        if candidate is not None:
            group, values = candidate.to_group(search), candidate.values
            groups.append((group, values))
            search.used.update(split.parameter for split in group.splits)
    return tuple(groups)


@dataclass
class _SplitSearch:
    """The state of the search for groups: the dataflow, its linear layers by weight, and the parameters (`used`) of the
    groups that were found so far."""

    flow: Dataflow
    layers: dict[str, LinearLayer]
    used: set[str] = field(default_factory=set)

    def value_of(self, parameter: str) -> int:
        values = self.flow.values
        return next(n for n, v in enumerate(values) if v.source == "parameter" and v.name == parameter)


@dataclass
class _GroupCandidate:
    """A group that is being built. It starts with column layers and tables; the other fields follow from how their
    outputs are used."""

    columns: dict[str, int]  # weight -> number of equal layers that are fused in it (or `_SLICED`)
    tables: dict[str, int]  # parameter that is no layer's weight -> its divided dimension
    rows: dict[str, int] = field(default_factory=dict)  # weight -> its number of input features
    slices: dict[str, tuple[int, ...]] = field(default_factory=dict)  # weight of a sliced layer -> sizes of its parts
    values: frozenset[int] = frozenset()
    degree: int = 0
    heads: int | None = None
    kv_heads: int | None = None

    def to_group(self, search: _SplitSearch) -> SplitGroup:
        name = search.layers[next(iter(self.columns))].module
        kind: SplitKind = "column" if self.heads is None else "heads"
        splits = []
        for weight, fused in self.columns.items():
            layer = search.layers[weight]
            parts = (layer.outputs // fused,) * fused if fused > 1 else ()
            if fused == _SLICED:
                parts = self.slices[weight]
            splits.append(ParameterSplit(layer.module, weight, kind, layer.dim, layer.outputs, name, parts))
        for table, dim in self.tables.items():
            size = search.flow.values[search.value_of(table)].shape[dim]
            splits.append(ParameterSplit(table.rpartition(".")[0], table, kind, dim, size, name))
        for weight, size in self.rows.items():
            layer = search.layers[weight]
            splits.append(
                ParameterSplit(layer.module, weight, "row", 1 - layer.dim, size, name, communication="all_reduce")
            )
        return SplitGroup(name, self.degree, tuple(splits), self.heads, self.kv_heads)


def _group_from(search: _SplitSearch, column: str) -> _GroupCandidate | None:
    """Returns the group that starts at the layer with the weight `column`, or None if that layer cannot be split."""
    for fused in _FUSED_PARTS:
        if fused > 1 and search.layers[column].outputs % fused:
            continue
        candidate = _complete_group(search, {column: fused}, {})
        if candidate is not None:
            return candidate
    return None


def _complete_group(search: _SplitSearch, columns: dict[str, int], tables: dict[str, int]) -> _GroupCandidate | None:
    """Follows the outputs of the divided layers and tables, and adds layers and tables that must be divided with them,
    until the group is complete. Returns None if no such group exists."""
    flow, layers = search.flow, search.layers
    first, fused = next(iter(columns.items()))
    masks: dict[int, DividedDimension] = {}  # values that depend on no layer or table: a rank slices its heads
    while True:
        try:
            return _follow(search, columns, tables, masks)
        except CannotSplit:
            return None
        except NeedsDividedInput as need:
            value, mask = need.value, need.dimension
        more = [name for name in producing_layers(flow, layers, value) if name not in columns]
        if not more and mask is not None and value not in masks and not lookup_tables(flow, layers, value):
            masks[value] = mask
            continue
        if not more:
            break
        if any(name in search.used for name in more):
            return None
        columns |= {name: fused if layers[name].outputs == layers[first].outputs else 1 for name in more}
    table = next((name for name in lookup_tables(flow, layers, value) if name not in tables), None)
    if table is None or table in search.used:
        return None
    shape = flow.values[search.value_of(table)].shape
    for dim in reversed([dim for dim, size in enumerate(shape) if size > 1]):  # heads are the last
        candidate = _complete_group(search, dict(columns), {**tables, table: dim})
        if candidate is not None:
            return candidate
    return None


def _follow(
    search: _SplitSearch, columns: dict[str, int], tables: dict[str, int], masks: dict[int, DividedDimension]
) -> _GroupCandidate:
    """Follows the divided values in the order of the operators, until row layers sum over them, and returns the group.
    Raises `CannotSplit`, or `NeedsDividedInput` if another value must be divided too."""
    flow, layers = search.flow, search.layers
    candidate = _GroupCandidate(columns, tables)
    divided: dict[int, DividedDimension] = dict(masks)
    layer_of_operator = {number: layer for layer in layers.values() for number in layer.operators}
    queue = [number for name in columns for number in layers[name].operators]
    for name, dim in tables.items():
        value = search.value_of(name)
        divided[value] = DividedDimension(dim, 1, flow.values[value].shape[dim], 1)
        queue += flow.consumers.get(value, ())
    queue.sort()
    seen = set(queue)
    row_operators: set[int] = set()  # products of row layers whose input is divided
    while queue:
        number = heappop(queue)
        op, layer = flow.operators[number], layer_of_operator.get(number)
        _refuse_custom_functions(flow, op, divided)
        if layer is not None and layer.parameter not in columns:
            candidate.rows[layer.parameter] = _row_inputs(flow, op, divided.get(matmul_operands(op)[0]))
            row_operators.add(number)
            continue
        for value, dimension in _divided_outputs(search, candidate, op, layer, divided).items():
            divided[value] = dimension
            if value in flow.outputs:
                raise CannotSplit("the model's output would be split")
            for user in flow.consumers.get(value, ()):
                if user not in seen:
                    seen.add(user)
                    heappush(queue, user)
    _check_rows(search, candidate, row_operators)
    for dimension in divided.values():
        candidate.degree = gcd(candidate.degree, dimension.count) if dimension.outer else candidate.degree
    if candidate.degree < 2:
        raise CannotSplit("nothing to divide")
    _note_slices(search, divided, candidate)
    candidate.values = frozenset(divided.keys() - masks.keys())
    return candidate


def _divided_outputs(
    search: _SplitSearch,
    candidate: _GroupCandidate,
    op: TracedOperator,
    layer: LinearLayer | None,
    divided: dict[int, DividedDimension],
) -> dict[int, DividedDimension]:
    """Returns the divided outputs of `op`. It is an operator of a column layer if `layer` is not None, else any
    operator with a divided input."""
    flow = search.flow
    if layer is not None:
        if matmul_operands(op)[0] in divided:
            raise CannotSplit("a split output feeds a layer of its own group")
        if not has_bias_of_same_module(flow, op, layer):
            raise CannotSplit("its bias is another module's")
        fused = candidate.columns[layer.parameter]
        last_dim = len(flow.values[op.outputs[0]].shape) - 1
        return {op.outputs[0]: DividedDimension(last_dim, fused, layer.outputs // max(fused, 1), 1)}
    if _overwrites_other_views(flow, op):
        raise CannotSplit(f"{op.name} writes a part of a larger tensor")
    if _adds_bias(flow, op, divided, candidate.columns):
        return {op.outputs[0]: next(divided[value] for value in op.inputs if value in divided)}
    outputs = propagate_split(flow, op, divided)
    _note_heads(op, divided, candidate)
    return outputs


def _refuse_custom_functions(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> None:
    """Raises `CannotSplit` if a custom autograd function has returned a divided input: its backward pass is not in the
    dataflow, so nothing is known of it."""
    for value in op.inputs:
        if value in divided and value in flow.custom_functions:
            raise CannotSplit(f"{flow.custom_functions[value]} is a custom autograd function")


def _row_inputs(flow: Dataflow, op: TracedOperator, dimension: DividedDimension | None) -> int:
    """Returns the number of input features of a row layer. Raises `CannotSplit` unless `dimension`, the divided
    dimension of the layer's input, is the last one."""
    shape = flow.values[matmul_operands(op)[0]].shape
    if dimension is None or dimension.outer != 1 or dimension.dim != len(shape) - 1:
        raise CannotSplit("a linear layer uses the parts otherwise than by summing them")
    return shape[-1]


def _check_rows(search: _SplitSearch, candidate: _GroupCandidate, row_operators: set[int]) -> None:
    """Raises `CannotSplit` unless the candidate has row layers, none of them is in another group, and all their
    products (`row_operators`) have a divided input."""
    operators = {number for name in candidate.rows for number in search.layers[name].operators}
    if not candidate.rows or operators != row_operators or search.used & candidate.rows.keys():
        raise CannotSplit("the parts are not summed up by layers of their own")


def _overwrites_other_views(flow: Dataflow, op: TracedOperator) -> bool:
    """Whether views other than the operator's output show the memory that it writes to and are used later. The division
    of such views would not be known."""
    others = set(op.replacements) - set(op.outputs)
    return any(flow.consumers.get(value) or value in flow.outputs for value in others)


def _adds_bias(
    flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension], columns: dict[str, int]
) -> bool:
    """Whether the operator adds the bias of a column layer, which is divided together with the layer's weight."""
    whole = [flow.values[value] for value in op.inputs if value not in divided]
    owners = {name.rpartition(".")[0] for name in columns}
    return (
        op.name in ("add", "add_")
        and len(whole) == 1
        and whole[0].source == "parameter"
        and len(whole[0].shape) == 1
        and whole[0].name.rpartition(".")[0] in owners
    )


def _note_heads(op: TracedOperator, divided: dict[int, DividedDimension], candidate: _GroupCandidate) -> None:
    """Sets the numbers of heads of the candidate at its first matrix product or attention of two divided values, which
    is where queries meet keys."""
    is_attention = "scaled_dot_product" in op.name or op.name == "bmm"
    if is_attention and candidate.heads is None and all(value in divided for value in op.inputs[:2]):
        counts = [divided[value].count for value in op.inputs[:2]]
        candidate.heads, candidate.kv_heads = max(counts), min(counts)


def _note_slices(search: _SplitSearch, divided: dict[int, DividedDimension], candidate: _GroupCandidate) -> None:
    """Sets the sizes of the parts of fused layers that the model slices. Raises `CannotSplit` unless the slices cover
    the output without overlapping."""
    flow, layers = search.flow, search.layers
    for name, fused in candidate.columns.items():
        if fused != _SLICED:
            continue
        sizes = [
            dimension.count * dimension.inner
            for op in flow.operators
            if op.inputs and op.inputs[0] in divided and divided[op.inputs[0]].outer == 0
            if name in producing_layers(flow, layers, op.inputs[0])
            for value in op.outputs
            if (dimension := divided.get(value)) is not None and dimension.outer
        ]
        uses = len(layers[name].operators)
        if sum(sizes) != layers[name].outputs * uses or len(sizes) < 2:
            raise CannotSplit("the slices of a fused layer overlap or leave something out")
        candidate.slices[name] = tuple(sizes[: len(sizes) // uses])

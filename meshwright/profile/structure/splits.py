"""How modules can be split along the tensor axis: which go together, by what size, and what then crosses ranks.

A group starts at a linear layer whose output features are divided (`column`). The parts are followed through every
operator that works on each part alone, until linear layers sum them up again (`row`). Whatever meets them on the way
must be divided likewise, so gates join, queries, keys and values join at attention, and so does a table that holds
something for every head (a bias by relative position). If a part ends anywhere else, the layer is not split.
"""

from dataclasses import dataclass
from heapq import heappop, heappush
from math import gcd
from typing import Literal

from meshwright.profile.structure.dataflow import Flow, Op
from meshwright.profile.structure.linears import Linear, find_linears, has_own_bias, operands, origins, tables
from meshwright.profile.structure.split_rules import Partner, Refused, Shard, follow

SplitKind = Literal["column", "row", "heads", "vocabulary"]
Source = Literal["derived", "published"]
_FUSED = (1, 2, 3, 0)  # how many equal layers one may be; 0: as its slices say


@dataclass(frozen=True)
class Split:
    """One parameter's split. `size` elements of its dimension `dim` are divided; ranks must divide `group`'s degree.

    `parts` are the sizes that a fused layer is made of: each is divided by itself. `crosses` is the communication
    behind the module in the forward pass.
    """

    module: str
    parameter: str
    kind: SplitKind
    dim: int
    size: int
    group: str
    parts: tuple[int, ...] = ()
    crosses: str = ""
    source: Source = "derived"


@dataclass(frozen=True)
class SplitGroup:
    """Modules that are split together or not at all; `degree` is divided by every number of ranks that works."""

    name: str
    degree: int
    splits: tuple[Split, ...]
    heads: int | None = None
    kv_heads: int | None = None


def find_splits(flow: Flow) -> tuple[SplitGroup, ...]:
    """Columns to rows, and attention by heads; `vocabulary` finds the others."""
    return tuple(group for group, _ in splits_with_values(flow))


def splits_with_values(flow: Flow) -> tuple[tuple[SplitGroup, frozenset[int]], ...]:
    """Each group with the values that are divided when it is."""
    linears = find_linears(flow)
    found: list[tuple[SplitGroup, frozenset[int]]] = []
    taken: set[str] = set()
    for name in linears:
        grown = None if name in taken else _grow(flow, linears, name, taken)
        if grown is not None:
            found.append(grown)
            taken.update(split.parameter for split in grown[0].splits)
    return tuple(found)


@dataclass
class _Attempt:
    """What following a set of divided layers has found so far."""

    columns: dict[str, int]  # weight -> how many layers it is made of
    tables: dict[str, int]  # parameter that is no layer's weight -> its divided dimension
    rows: dict[str, int]
    slices: dict[str, set[tuple[int, int]]]
    values: frozenset[int] = frozenset()
    degree: int = 0
    heads: int | None = None
    kv_heads: int | None = None


def _grow(
    flow: Flow, linears: dict[str, Linear], seed: str, taken: set[str]
) -> tuple[SplitGroup, frozenset[int]] | None:
    for fused in _FUSED:
        if fused > 1 and linears[seed].outputs % fused:
            continue
        attempt = _joined(flow, linears, {seed: fused}, {}, taken)
        if attempt is not None:
            return _group(flow, linears, attempt), attempt.values
    return None


def _joined(
    flow: Flow, linears: dict[str, Linear], columns: dict[str, int], along: dict[str, int], taken: set[str]
) -> _Attempt | None:
    """Follows the parts, with whatever must be divided likewise, until they fit."""
    seed, fused = next(iter(columns.items()))
    masks: dict[int, Shard] = {}  # that no layer and no table stands behind: every rank takes its heads of them
    while True:
        try:
            return _followed(flow, linears, columns, along, masks, taken)
        except Refused:
            return None
        except Partner as partner:
            value, mask = partner.value, partner.along
        more = [name for name in origins(flow, linears, value) if name not in columns]
        if not more and mask is not None and value not in masks and not tables(flow, linears, value):
            masks[value] = mask
            continue
        if not more:
            break
        if any(name in taken for name in more):
            return None
        columns |= {name: fused if linears[name].outputs == linears[seed].outputs else 1 for name in more}
    table = next((name for name in tables(flow, linears, value) if name not in along), None)
    if table is None or table in taken:
        return None
    shape = flow.values[_number(flow, table)].shape
    for dim in reversed([dim for dim, size in enumerate(shape) if size > 1]):  # tables have their heads last
        found = _joined(flow, linears, dict(columns), {**along, table: dim}, taken)
        if found is not None:
            return found
    return None


def _followed(
    flow: Flow,
    linears: dict[str, Linear],
    columns: dict[str, int],
    along: dict[str, int],
    masks: dict[int, Shard],
    taken: set[str],
) -> _Attempt:
    attempt = _Attempt(columns, along, {}, {})
    shards: dict[int, Shard] = dict(masks)
    by_op = {number: linear for linear in linears.values() for number in linear.ops}
    queue = [number for name in columns for number in linears[name].ops]
    for name, dim in along.items():
        value = _number(flow, name)
        shards[value] = Shard(dim, 1, flow.values[value].shape[dim], 1)
        queue += flow.consumers.get(value, ())
    queue.sort()
    seen = set(queue)
    fed: set[int] = set()  # uses of row layers whose input is split
    while queue:
        number = heappop(queue)
        op, linear = flow.ops[number], by_op.get(number)
        if linear is not None:
            split_input = shards.get(operands(op)[0])
            if linear.parameter in columns:
                if split_input is not None:
                    raise Refused("a split output feeds a layer of its own group")
                if not has_own_bias(flow, op, linear):
                    raise Refused("its bias is another module's")
                made = {op.outputs[0]: _column(flow, op, linear, columns[linear.parameter])}
            else:
                attempt.rows[linear.parameter] = _row(flow, op, split_input)
                fed.add(number)
                made = {}
        elif _overwrites_more(flow, op):
            raise Refused(f"{op.name} writes a part of a larger tensor")
        elif _is_bias(flow, op, shards, columns):
            made = {op.outputs[0]: next(shards[value] for value in op.inputs if value in shards)}
        else:
            made = follow(flow, op, shards)
            _note_heads(op, shards, attempt)
        for value, shard in made.items():
            shards[value] = shard
            if value in flow.outputs:
                raise Refused("the model's output would be split")
            for user in flow.consumers.get(value, ()):
                if user not in seen:
                    seen.add(user)
                    heappush(queue, user)
    uses = {number for name in attempt.rows for number in linears[name].ops}
    if not attempt.rows or uses != fed or taken & attempt.rows.keys():
        raise Refused("the parts are not summed up by layers of their own")
    for shard in shards.values():
        attempt.degree = gcd(attempt.degree, shard.count) if shard.outer else attempt.degree
    if attempt.degree < 2:
        raise Refused("nothing to divide")
    _note_slices(flow, linears, shards, attempt)
    attempt.values = frozenset(shards.keys() - masks.keys())
    return attempt


def _number(flow: Flow, parameter: str) -> int:
    return next(n for n, v in enumerate(flow.values) if v.source == "parameter" and v.name == parameter)


def _column(flow: Flow, op: Op, linear: Linear, fused: int) -> Shard:
    dim = len(flow.values[op.outputs[0]].shape) - 1
    return Shard(dim, fused, linear.outputs // max(fused, 1), 1)


def _row(flow: Flow, op: Op, shard: Shard | None) -> int:
    shape = flow.values[operands(op)[0]].shape
    if shard is None or shard.outer != 1 or shard.dim != len(shape) - 1:
        raise Refused("a linear layer uses the parts otherwise than by summing them")
    return shape[-1]


def _overwrites_more(flow: Flow, op: Op) -> bool:
    """Whether other views of the memory that is written to are used later: their parts would not be followed."""
    others = set(op.rewritten) - set(op.outputs)
    return any(flow.consumers.get(value) or value in flow.outputs for value in others)


def _is_bias(flow: Flow, op: Op, shards: dict[int, Shard], columns: dict[str, int]) -> bool:
    """A bias added by itself is divided with its layer."""
    whole = [flow.values[value] for value in op.inputs if value not in shards]
    owners = {name.rpartition(".")[0] for name in columns}
    return (
        op.name in ("add", "add_")
        and len(whole) == 1
        and whole[0].source == "parameter"
        and len(whole[0].shape) == 1
        and whole[0].name.rpartition(".")[0] in owners
    )


def _note_heads(op: Op, shards: dict[int, Shard], attempt: _Attempt) -> None:
    """Queries meet keys where two split values are multiplied head by head."""
    attends = "scaled_dot_product" in op.name or op.name == "bmm"
    if attends and attempt.heads is None and all(value in shards for value in op.inputs[:2]):
        counts = [shards[value].count for value in op.inputs[:2]]
        attempt.heads, attempt.kv_heads = max(counts), min(counts)


def _note_slices(flow: Flow, linears: dict[str, Linear], shards: dict[int, Shard], attempt: _Attempt) -> None:
    """A layer that is fused as its slices say must be taken apart once, without gaps."""
    for name, fused in attempt.columns.items():
        if fused:
            continue
        sizes = [
            shard.count * shard.inner
            for op in flow.ops
            if op.inputs and op.inputs[0] in shards and shards[op.inputs[0]].outer == 0
            if name in origins(flow, linears, op.inputs[0])
            for value in op.outputs
            if (shard := shards.get(value)) is not None and shard.outer
        ]
        if sum(sizes) != linears[name].outputs * len(linears[name].ops) or len(sizes) < 2:
            raise Refused("the slices of a fused layer overlap or leave something out")
        attempt.slices[name] = set(enumerate(sizes[: len(sizes) // len(linears[name].ops)]))


def _group(flow: Flow, linears: dict[str, Linear], attempt: _Attempt) -> SplitGroup:
    first = linears[next(iter(attempt.columns))]
    name = first.module
    kind: SplitKind = "column" if attempt.heads is None else "heads"
    splits = []
    for weight, fused in attempt.columns.items():
        linear = linears[weight]
        parts = (linear.outputs // fused,) * fused if fused > 1 else ()
        if not fused:
            parts = tuple(size for _, size in sorted(attempt.slices[weight]))
        splits.append(Split(linear.module, weight, kind, linear.dim, linear.outputs, name, parts))
    for table, dim in attempt.tables.items():
        size = flow.values[_number(flow, table)].shape[dim]
        splits.append(Split(table.rpartition(".")[0], table, kind, dim, size, name))
    for weight, size in attempt.rows.items():
        linear = linears[weight]
        splits.append(Split(linear.module, weight, "row", 1 - linear.dim, size, name, crosses="all_reduce"))
    return SplitGroup(name, attempt.degree, tuple(splits), attempt.heads, attempt.kv_heads)

"""Where a split dimension goes when an operator runs on each part alone: the rule of every operator that has one.

The features of a linear layer are split into equal parts. An operator is followed only where each rank, holding its
part of the inputs, computes its part of the output without a word to the others; everything else is refused by name.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from meshwright.profile.structure.dataflow import Flow, Op, Ref


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is outer × count × inner, and it is `count` that is divided among ranks.

    `outer` 0 marks the output of a fused layer that is still to be taken apart: each slice is divided by itself.
    """

    dim: int
    outer: int
    count: int
    inner: int


class Refused(Exception):
    """The operator cannot run on parts, with the reason."""


class Partner(Exception):
    """The operator could run on parts if this value, which is whole, were split too. Where `along` is given, no
    layer has to be split for it: each rank can take its places of that dimension."""

    def __init__(self, value: int, along: Shard | None = None) -> None:
        super().__init__(value)
        self.value = value
        self.along = along


# Names of torch's operators. The elements of the first keep their order; those of the last work along a dimension.
_WORDS = {
    "in_order": "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten alias detach clone "
    "contiguous _to_copy lift_fresh rand_like randn_like empty_like zeros_like ones_like full_like bernoulli "
    "bernoulli_ uniform_ normal_ zero_ fill_",
    "moved": "t transpose permute expand repeat",
    "sliced": "slice select split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind",
    "reduced": "mean sum amax amin var std linalg_vector_norm _softmax _log_softmax softmax _safe_softmax cumsum",
}
_RULES = {name: rule for rule, names in _WORDS.items() for name in names.split()}


def follow(flow: Flow, op: Op, shards: dict[int, Shard]) -> dict[int, Shard]:
    """The shards of the operator's outputs, where some of its inputs are split."""
    name, first = op.name, _first(op)
    rule = _RULES.get(name)
    if rule and first not in shards:
        raise Refused(f"{name} overwrites or shapes something else with the parts")
    if rule == "in_order":
        return {op.outputs[0]: reshaped(shards[first], _shape(flow, first), _shape(flow, op.outputs[0]))}
    unsliced = [value for value in op.inputs if value in shards and shards[value].outer == 0]
    if rule == "sliced":
        return _slices(flow, op, shards[first])
    if torch.Tag.pointwise in op.func.tags and (not unsliced or len(op.inputs) == 1):
        return {op.outputs[0]: _joined(flow, op, shards)}
    if unsliced:
        raise Refused(f"{name} uses a fused output whole")
    if rule == "moved":
        return {op.outputs[0]: _moved(flow, op, shards[first])}
    if name in ("cat", "stack"):
        return {op.outputs[0]: _concatenated(flow, op, shards)}
    if name == "native_dropout" and first in shards:
        return dict.fromkeys(op.outputs, shards[first])
    if rule == "reduced":
        return {op.outputs[0]: _reduced(flow, op, shards[first])}
    if "layer_norm" in name or "rms_norm" in name:
        return _normed(flow, op, shards)
    if name in ("bmm", "mm"):
        return {op.outputs[0]: _product(flow, op, shards)}
    if "scaled_dot_product" in name:
        return _attention(flow, op, shards)
    if name in ("embedding", "index") and first in shards:
        return {op.outputs[0]: _looked_up(flow, op, shards[first])}
    raise Refused(f"{name} needs the whole dimension")


def reshaped(shard: Shard, old: Sequence[int], new: Sequence[int]) -> Shard:
    """The elements keep their order, so what lies before the divided factor is the same number of elements."""
    if shard.outer == 0:
        if new[-1] != old[-1] or shard.dim != len(old) - 1:
            raise Refused("a fused output is taken apart otherwise than by slices")
        return replace(shard, dim=len(new) - 1)
    before = prod(old[: shard.dim]) * shard.outer
    passed = 1
    for dim, size in enumerate(new):
        outer, rest = divmod(before, passed)
        if rest or size % outer:
            if size != 1 and before % (passed * size):
                break
        elif size // outer > 1:
            return _placed(dim, outer, size // outer, shard.count)
        passed *= size
    raise Refused("a reshape mixes the parts")


def _placed(dim: int, outer: int, room: int, count: int) -> Shard:
    if room % count == 0:
        return Shard(dim, outer, count, room // count)
    if count % room == 0:
        return Shard(dim, outer, room, 1)
    raise Refused("a reshape mixes the parts")


def join(left: Shard, right: Shard) -> Shard:
    """Equal places; where one has fewer parts, it decides."""
    same = (left.dim, left.outer) == (right.dim, right.outer) and left.count * left.inner == right.count * right.inner
    if not same:
        raise Refused("two split inputs do not fit together")
    count = gcd(left.count, right.count)
    return replace(left, count=count, inner=left.count * left.inner // count)


def _slices(flow: Flow, op: Op, shard: Shard) -> dict[int, Shard]:
    first = _first(op)
    shape = _shape(flow, first)
    dim = _argument(op, "dim", 0) % len(shape)
    single = op.name in ("select", "unbind")
    if dim != shard.dim:
        moved = replace(shard, dim=shard.dim - 1) if single and dim < shard.dim else shard
        return dict.fromkeys(op.outputs, moved)
    if single:
        if shard.outer and shard.count * shard.inner == 1:
            return {}
        raise Refused(f"{op.name} takes one of the parts")
    if op.name == "slice" and _argument(op, "step", 1) != 1:
        raise Refused("a slice in steps mixes the parts")
    start = _argument(op, "start", 0) or 0 if op.name == "slice" else 0
    found: dict[int, Shard] = {}
    for value in op.outputs:
        size = _shape(flow, value)[dim]
        if shard.outer == 0:
            found[value] = Shard(dim, 1, size, 1)
        else:
            block = shard.count * shard.inner
            if start % block or size % block:
                raise Refused(f"{op.name} cuts through the parts")
            found[value] = replace(shard, outer=size // block)
        start += size
    return found


def _moved(flow: Flow, op: Op, shard: Shard) -> Shard:
    old, new = _shape(flow, _first(op)), _shape(flow, op.outputs[0])
    if op.name in ("expand", "repeat"):
        dim = shard.dim + len(new) - len(old)
        if new[dim] != old[shard.dim]:
            raise Refused(f"{op.name} repeats the parts")
        return replace(shard, dim=dim)
    order = list(range(len(old)))
    if op.name == "permute":
        order = [dim % len(old) for dim in _argument(op, "dims", None)]
    else:
        a, b = (0, 1) if op.name == "t" else (_argument(op, "dim0", 0), _argument(op, "dim1", 1))
        order[a % len(old)], order[b % len(old)] = order[b % len(old)], order[a % len(old)]
    return replace(shard, dim=order.index(shard.dim))


def _concatenated(flow: Flow, op: Op, shards: dict[int, Shard]) -> Shard:
    values = [ref.value for ref in op.args[0] if prod(_shape(flow, ref.value))]
    for value in values:
        if value not in shards:
            raise Partner(value)
    shape = _shape(flow, values[0])
    dim = _argument(op, "dim", 0)
    if op.name == "stack":
        dim %= len(shape) + 1
    found = shards[values[0]]
    for value in values[1:]:
        found = join(found, shards[value])
    if op.name == "stack":
        return replace(found, dim=found.dim + (dim <= found.dim))
    if dim % len(shape) == found.dim:
        raise Refused("cat joins the split dimension")
    return found


def _joined(flow: Flow, op: Op, shards: dict[int, Shard]) -> Shard:
    out = _shape(flow, op.outputs[0])
    found: Shard | None = None
    for value in op.inputs:
        if value in shards:
            placed = replace(shards[value], dim=shards[value].dim + len(out) - len(_shape(flow, value)))
            found = placed if found is None else join(found, placed)
    assert found is not None
    for value in op.inputs:
        shape = _shape(flow, value)
        dim = found.dim - (len(out) - len(shape))
        if value not in shards and dim >= 0 and shape[dim] != 1:
            raise Partner(value)
    return found


def _reduced(flow: Flow, op: Op, shard: Shard) -> Shard:
    shape = _shape(flow, _first(op))
    given = _argument(op, "dim", None)
    dims = range(len(shape)) if given is None or given == [] else [given] if isinstance(given, int) else given
    gone = {dim % len(shape) for dim in dims}
    if shard.dim in gone:
        raise Refused(f"{op.name} reduces the split dimension")
    kept = len(_shape(flow, op.outputs[0])) == len(shape)
    return shard if kept else replace(shard, dim=shard.dim - sum(dim < shard.dim for dim in gone))


def _normed(flow: Flow, op: Op, shards: dict[int, Shard]) -> dict[int, Shard]:
    first = _first(op)
    if first not in shards:
        raise Refused(f"{op.name} is given split weights")
    sizes = [a for a in op.args[1:] if isinstance(a, list | tuple)]
    width = len(sizes[0]) if sizes else len(_shape(flow, op.inputs[1]))
    if shards[first].dim >= len(_shape(flow, first)) - width:
        raise Refused(f"{op.name} reduces the split dimension")
    return {value: shards[first] for value in op.outputs if len(_shape(flow, value)) == len(_shape(flow, first))}


def _product(flow: Flow, op: Op, shards: dict[int, Shard]) -> Shard:
    left, right = op.inputs[0], op.inputs[1]
    rank = len(_shape(flow, left))
    for value, other in ((left, right), (right, left)):
        if value in shards and shards[value].dim < rank - 2 and other not in shards:
            raise Partner(other)
    if left in shards and right in shards:
        found = join(shards[left], shards[right])
        if found.dim < rank - 2:
            return found
    elif left in shards and shards[left].dim == rank - 2:
        return shards[left]
    elif right in shards and shards[right].dim == rank - 1:
        return shards[right]
    raise Refused("a product sums over the split dimension")


def _attention(flow: Flow, op: Op, shards: dict[int, Shard]) -> dict[int, Shard]:
    trio = op.inputs[:3]
    for value in trio:
        if value not in shards:
            raise Partner(value)
    found = shards[trio[0]]
    for value in trio:
        shard = shards[value]
        if shard.dim != 1 or shard.outer != 1:
            raise Refused("attention is split otherwise than by heads")
        count = gcd(found.count, shard.count)
        found = replace(found, count=count, inner=found.count * found.inner // count)
    for mask in op.inputs[3:]:
        shape = _shape(flow, mask)
        if mask in shards:
            found = join(found, replace(shards[mask], dim=shards[mask].dim + 4 - len(shape)))
        elif len(shape) > 2 and shape[-3] != 1:
            raise Partner(mask, Shard(len(shape) - 3, 1, shape[-3], 1))
    heads = _shape(flow, trio[0])[1]
    return {value: found for value in op.outputs if len(_shape(flow, value)) >= 3 and _shape(flow, value)[1] == heads}


def _looked_up(flow: Flow, op: Op, shard: Shard) -> Shard:
    """Rows of a table, as many as there are indices: what lies behind the rows keeps its place from the end."""
    rows = 1 if op.name == "embedding" else len(op.args[1])
    if shard.dim < rows or (op.name == "index" and None in op.args[1]):
        raise Refused(f"{op.name} looks the parts up")
    return replace(shard, dim=shard.dim + len(_shape(flow, op.outputs[0])) - len(_shape(flow, _first(op))))


def _first(op: Op) -> int:
    """Lists of tensors count by their first."""
    return next((leaf.value for leaf in tree_leaves(op.args) if isinstance(leaf, Ref)), -1)


def _shape(flow: Flow, value: int) -> tuple[int, ...]:
    return flow.values[value].shape


def _argument(op: Op, name: str, default: Any) -> Any:
    """An operator's argument by name, however it was passed."""
    for place, argument in enumerate(op.func._schema.arguments):
        if argument.name == name or (name == "dims" and argument.name == "dim"):
            if place < len(op.args):
                return op.args[place]
            return op.kwargs.get(argument.name, default if argument.default_value is None else argument.default_value)
    return default

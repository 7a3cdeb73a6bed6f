"""Decides for one operator whether ranks that each have a part of its inputs can compute their part of its output
without communication, and which dimension of the output is then divided. `propagate_split` selects the rule of an
operator. It raises `CannotSplit` with the reason if there is no rule, or if the rule does not allow the division.
`splits.py` applies these rules to groups of layers, and `parallel/tensor/` to the operators of a running model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

import torch

from meshwright.profile.structure.dataflow import Dataflow, TracedOperator, ValueRef
from meshwright.profile.torch_private import operator_arguments, tree_leaves


@dataclass(frozen=True)
class DividedDimension:
    """How a value is divided among ranks: its dimension `dim` is viewed as outer × count × inner, and each rank has
    some of the `count` entries.

    `outer` is 0 for the output of a fused layer before it is sliced; each of its slices is then divided separately.
    """

    dim: int
    outer: int
    count: int
    inner: int


class CannotSplit(Exception):
    """An operator cannot run on divided inputs. The message says why."""


class NeedsDividedInput(Exception):
    """An operator could run on divided inputs if `value`, which every rank has in full, were divided too. If
    `dimension` is not None, no layer has to be split for that, because each rank can slice `value` along this
    dimension."""

    def __init__(self, value: int, dimension: DividedDimension | None = None) -> None:
        super().__init__(value)
        self.value = value
        self.dimension = dimension


# Names of torch's operators by rule: operators that keep the order of all elements, that permute or expand dimensions,
# that take slices, that reduce or normalize along dimensions, that select the largest elements along one, and that read
# or write elements at given indices along one.
_OPERATORS_BY_RULE = {
    "keeps_order": "view _unsafe_view reshape _reshape_alias unsqueeze squeeze flatten unflatten alias detach clone "
    "contiguous _to_copy lift_fresh rand_like randn_like empty_like zeros_like ones_like full_like bernoulli "
    "bernoulli_ uniform_ normal_ zero_ fill_",
    "permutes": "t transpose permute expand repeat",
    "slices": "slice select split split_with_sizes unsafe_split unsafe_split_with_sizes chunk unbind",
    "reduces": "mean sum amax amin var std linalg_vector_norm _softmax _log_softmax softmax _safe_softmax cumsum",
    "selects": "topk sort argmax argmin max min",
    "indexes": "gather scatter scatter_ scatter_add scatter_add_",
}
_RULES = {name: rule for rule, names in _OPERATORS_BY_RULE.items() for name in names.split()}


def propagate_split(
    flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]
) -> dict[int, DividedDimension]:
    """Returns the divided outputs of an operator. `divided` contains at least one of its inputs. Raises `CannotSplit`,
    or `NeedsDividedInput` if another input must be divided as well."""
    name, first = op.name, _first_tensor(op)
    rule = _RULES.get(name)
    if rule and first not in divided:
        raise CannotSplit(f"{name} overwrites or shapes something else with the parts")
    if rule == "keeps_order":
        return {op.outputs[0]: divided_after_reshape(divided[first], _shape(flow, first), _shape(flow, op.outputs[0]))}
    unsliced = [value for value in op.inputs if value in divided and divided[value].outer == 0]
    if rule == "slices":
        return _sliced(flow, op, divided[first])
    is_pointwise = torch.Tag.pointwise in op.func.tags or name == "masked_fill_"  # torch has not tagged this one
    if is_pointwise and (not unsliced or len(op.inputs) == 1):
        return {op.outputs[0]: _pointwise(flow, op, divided)}
    if unsliced:
        raise CannotSplit(f"{name} uses a fused output whole")
    if rule == "permutes":
        return {op.outputs[0]: _permuted(flow, op, divided[first])}
    if name in ("cat", "stack"):
        return {op.outputs[0]: _concatenated(flow, op, divided)}
    if name == "native_dropout" and first in divided:
        return dict.fromkeys(op.outputs, divided[first])
    if rule == "reduces":
        return {op.outputs[0]: _reduced(flow, op, divided[first])}
    if rule == "selects":
        return dict.fromkeys(op.outputs, _reduced(flow, op, divided[first]))
    if rule == "indexes":
        return {op.outputs[0]: _indexed(flow, op, divided)}
    if "layer_norm" in name or "rms_norm" in name:
        return _normalized(flow, op, divided)
    if name in ("bmm", "mm"):
        return {op.outputs[0]: _product(flow, op, divided)}
    if "scaled_dot_product" in name:
        return _attention(flow, op, divided)
    if name in ("embedding", "index") and first in divided:
        return {op.outputs[0]: _lookup(flow, op, divided[first])}
    raise CannotSplit(f"{name} needs the whole dimension")


def divided_after_reshape(dimension: DividedDimension, old: Sequence[int], new: Sequence[int]) -> DividedDimension:
    """Returns how a value is divided after a reshape from the shape `old` to `new`. A reshape keeps the order of the
    elements, therefore the product of all sizes before the divided factor stays the same."""
    if dimension.outer == 0:
        if new[-1] != old[-1] or dimension.dim != len(old) - 1:
            raise CannotSplit("a fused output is divided otherwise than by slices")
        return replace(dimension, dim=len(new) - 1)
    before = prod(old[: dimension.dim]) * dimension.outer  # the product of all sizes before the divided factor
    product = 1  # of the new sizes so far
    for dim, size in enumerate(new):
        outer, rest = divmod(before, product)
        if rest or size % outer:
            if size != 1 and before % (product * size):
                break
        elif size // outer > 1:
            return _place_in_dim(dim, outer, size // outer, dimension.count)
        product *= size
    raise CannotSplit("a reshape mixes the parts")


def _place_in_dim(dim: int, outer: int, size: int, count: int) -> DividedDimension:
    """Returns the division of a dimension of outer × size elements into `count` parts. If `count` is a multiple of
    `size`, the dimension has only `size` parts, because the remaining factor of `count` lies in later dimensions."""
    if size % count == 0:
        return DividedDimension(dim, outer, count, size // count)
    if count % size == 0:
        return DividedDimension(dim, outer, size, 1)
    raise CannotSplit("a reshape mixes the parts")


def merge_divided(left: DividedDimension, right: DividedDimension) -> DividedDimension:
    """Returns how the result of combining two divided values is divided. Both must be divided along the same elements;
    the number of parts is the greatest common divisor of their counts."""
    has_same_dim = (left.dim, left.outer) == (right.dim, right.outer)
    if not has_same_dim or left.count * left.inner != right.count * right.inner:
        raise CannotSplit("two split inputs do not fit together")
    count = gcd(left.count, right.count)
    return replace(left, count=count, inner=left.count * left.inner // count)


def _sliced(flow: Dataflow, op: TracedOperator, dimension: DividedDimension) -> dict[int, DividedDimension]:
    """Returns the divided outputs of a slicing operator. Slices along other dimensions do not change the division.
    Along the divided dimension, a slice must begin and end at multiples of count · inner."""
    shape = _shape(flow, _first_tensor(op))
    dim = _argument(op, "dim", 0) % len(shape)
    drops_dim = op.name in ("select", "unbind")
    if dim != dimension.dim:
        shifted = replace(dimension, dim=dimension.dim - 1) if drops_dim and dim < dimension.dim else dimension
        return dict.fromkeys(op.outputs, shifted)
    if drops_dim:
        if dimension.outer and dimension.count * dimension.inner == 1:
            return {}
        raise CannotSplit(f"{op.name} takes one of the parts")
    if op.name == "slice" and _argument(op, "step", 1) != 1:
        raise CannotSplit("a slice in steps mixes the parts")
    start = _argument(op, "start", 0) or 0 if op.name == "slice" else 0
    slices: dict[int, DividedDimension] = {}
    for value in op.outputs:
        size = _shape(flow, value)[dim]
        if dimension.outer == 0:
            slices[value] = DividedDimension(dim, 1, size, 1)
        else:
            period = dimension.count * dimension.inner
            if start % period or size % period:
                raise CannotSplit(f"{op.name} cuts through the parts")
            slices[value] = replace(dimension, outer=size // period)
        start += size
    return slices


def _permuted(flow: Dataflow, op: TracedOperator, dimension: DividedDimension) -> DividedDimension:
    """Returns the divided dimension at its new position. Raises `CannotSplit` if the operator repeats it."""
    old, new = _shape(flow, _first_tensor(op)), _shape(flow, op.outputs[0])
    if op.name in ("expand", "repeat"):
        dim = dimension.dim + len(new) - len(old)
        if new[dim] != old[dimension.dim]:
            raise CannotSplit(f"{op.name} repeats the parts")
        return replace(dimension, dim=dim)
    order = list(range(len(old)))
    if op.name == "permute":
        order = [dim % len(old) for dim in _argument(op, "dims", None)]
    else:
        a, b = (0, 1) if op.name == "t" else (_argument(op, "dim0", 0), _argument(op, "dim1", 1))
        order[a % len(old)], order[b % len(old)] = order[b % len(old)], order[a % len(old)]
    return replace(dimension, dim=order.index(dimension.dim))


def _concatenated(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> DividedDimension:
    """Returns the division of the result of `cat` or `stack`. All tensors must be divided in the same way, and not
    along the dimension of the concatenation."""
    values = [ref.value for ref in op.args[0] if prod(_shape(flow, ref.value))]
    for value in values:
        if value not in divided:
            raise NeedsDividedInput(value)
    shape = _shape(flow, values[0])
    dim = _argument(op, "dim", 0)
    if op.name == "stack":
        dim %= len(shape) + 1
    result = divided[values[0]]
    for value in values[1:]:
        result = merge_divided(result, divided[value])
    if op.name == "stack":
        return replace(result, dim=result.dim + (dim <= result.dim))
    if dim % len(shape) == result.dim:
        raise CannotSplit("cat joins the split dimension")
    return result


def _pointwise(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> DividedDimension:
    """Returns the division of the result of an element-wise operator. After broadcasting, all inputs must be divided in
    the same way, except inputs that are broadcast along the divided dimension."""
    output_shape = _shape(flow, op.outputs[0])
    result: DividedDimension | None = None
    for value in op.inputs:
        if value in divided:
            added_dims = len(output_shape) - len(_shape(flow, value))
            broadcast = replace(divided[value], dim=divided[value].dim + added_dims)
            result = broadcast if result is None else merge_divided(result, broadcast)
    assert result is not None
    for value in op.inputs:
        shape = _shape(flow, value)
        dim = result.dim - (len(output_shape) - len(shape))
        if value not in divided and dim >= 0 and shape[dim] != 1:
            raise NeedsDividedInput(value)
    return result


def _reduced(flow: Dataflow, op: TracedOperator, dimension: DividedDimension) -> DividedDimension:
    """Returns the division of the result of a reduction. The reduced dimensions must not include the divided
    dimension."""
    shape = _shape(flow, _first_tensor(op))
    dims = _argument(op, "dim", None)
    if dims is None or dims == []:
        dims = range(len(shape))
    reduced = {dim % len(shape) for dim in ([dims] if isinstance(dims, int) else dims)}
    if dimension.dim in reduced:
        raise CannotSplit(f"{op.name} reduces the split dimension")
    keeps_dims = len(_shape(flow, op.outputs[0])) == len(shape)
    if keeps_dims:
        return dimension
    return replace(dimension, dim=dimension.dim - sum(dim < dimension.dim for dim in reduced))


def _indexed(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> DividedDimension:
    """Returns the division of a tensor of which elements are read or written at indices along one dimension. It must
    not be the divided one, along which tensor, indices and written elements must be divided alike."""
    result = _reduced(flow, op, divided[_first_tensor(op)])
    for value in op.inputs:
        if value not in divided:
            raise NeedsDividedInput(value)
        result = merge_divided(result, divided[value])
    return result


def _normalized(
    flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]
) -> dict[int, DividedDimension]:
    """Returns the divided outputs of a normalization. The normalized dimensions, which are the last ones, must not
    include the divided dimension."""
    first = _first_tensor(op)
    if first not in divided:
        raise CannotSplit(f"{op.name} has split weights")
    sizes = [a for a in op.args[1:] if isinstance(a, list | tuple)]
    normalized_dims = len(sizes[0]) if sizes else len(_shape(flow, op.inputs[1]))
    if divided[first].dim >= len(_shape(flow, first)) - normalized_dims:
        raise CannotSplit(f"{op.name} reduces the split dimension")
    return {value: divided[first] for value in op.outputs if len(_shape(flow, value)) == len(_shape(flow, first))}


def _product(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> DividedDimension:
    """Returns the division of a matrix product. It may be divided along its batch dimension (both operands in the same
    way), along the rows of the left operand, or along the columns of the right operand."""
    left, right = op.inputs[0], op.inputs[1]
    dims = len(_shape(flow, left))
    for value, other in ((left, right), (right, left)):
        if value in divided and divided[value].dim < dims - 2 and other not in divided:
            raise NeedsDividedInput(other)
    if left in divided and right in divided:
        result = merge_divided(divided[left], divided[right])
        if result.dim < dims - 2:
            return result
    elif left in divided and divided[left].dim == dims - 2:
        return divided[left]
    elif right in divided and divided[right].dim == dims - 1:
        return divided[right]
    raise CannotSplit("a product sums over the split dimension")


def _attention(flow: Dataflow, op: TracedOperator, divided: dict[int, DividedDimension]) -> dict[int, DividedDimension]:
    """Returns the divided outputs of attention: those with one entry per head. Query, key and value must be divided by
    heads, and so must a mask that has more than one head."""
    query, *_ = query_key_value = op.inputs[:3]
    for value in query_key_value:
        if value not in divided:
            raise NeedsDividedInput(value)
    result = divided[query]
    for value in query_key_value:
        dimension = divided[value]
        if dimension.dim != 1 or dimension.outer != 1:
            raise CannotSplit("attention is divided otherwise than by heads")
        count = gcd(result.count, dimension.count)
        result = replace(result, count=count, inner=result.count * result.inner // count)
    for mask in op.inputs[3:]:
        shape = _shape(flow, mask)
        if mask in divided:
            result = merge_divided(result, replace(divided[mask], dim=divided[mask].dim + 4 - len(shape)))
        elif len(shape) > 2 and shape[-3] != 1:
            raise NeedsDividedInput(mask, DividedDimension(len(shape) - 3, 1, shape[-3], 1))
    heads = _shape(flow, query)[1]
    return {value: result for value in op.outputs if len(_shape(flow, value)) >= 3 and _shape(flow, value)[1] == heads}


def _lookup(flow: Dataflow, op: TracedOperator, dimension: DividedDimension) -> DividedDimension:
    """Returns the division of the result of `embedding` or `index`. The indexed dimensions must not include the divided
    dimension. The divided dimension keeps its position counted from the last dimension."""
    indexed_dims = 1 if op.name == "embedding" else len(op.args[1])
    if dimension.dim < indexed_dims or (op.name == "index" and None in op.args[1]):
        raise CannotSplit(f"{op.name} looks the parts up")
    return replace(
        dimension, dim=dimension.dim + len(_shape(flow, op.outputs[0])) - len(_shape(flow, _first_tensor(op)))
    )


def _first_tensor(op: TracedOperator) -> int:
    """The number of the first tensor's value among the operator's arguments, including tensors inside of lists; -1 if
    there is none."""
    return next((leaf.value for leaf in tree_leaves(op.args) if isinstance(leaf, ValueRef)), -1)


def _shape(flow: Dataflow, value: int) -> tuple[int, ...]:
    return flow.values[value].shape


def _argument(op: TracedOperator, name: str, default: Any) -> Any:
    """Returns an operator's argument by name, whether it was passed by position or by name. If it was not passed,
    returns the operator's default value for it, or else `default`."""
    for position, argument in enumerate(operator_arguments(op.func)):
        if argument.name == name or (name == "dims" and argument.name == "dim"):
            if position < len(op.args):
                return op.args[position]
            return op.kwargs.get(argument.name, default if argument.default_value is None else argument.default_value)
    return default

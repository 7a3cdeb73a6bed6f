"""Standalone splits: linear layers that a plan names in `modules.splits` although no `SplitGroup` of the model's
structure contains them. Each of them is split by itself.

In a group, a rank passes its part of a layer's output to the next layer, and the last layer's outputs are summed. The
output of a standalone layer is put together directly behind the layer (messages.py). `with_standalone_splits` adds a
group for each standalone layer, which other modules treat like the groups of the structure. Of the layer's operators
and memory:

    column   weight and bias, their gradients and casts are divided; the input is kept whole, also where the values
             around the layer are divided by samples or along the sequence                           with_saved_inputs
    row      the weight, its gradient and its casts are divided; what is kept of the input is as large as before
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.blocks.module_names import is_inside
from meshwright.dtypes import ITEM_BYTES
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Modules
from meshwright.profile.structure.splits import ParameterSplit, SplitGroup
from meshwright.profile.values import (
    BatchPolynomial,
    MemoryChange,
    MemoryRole,
    ModelProfile,
    Operator,
    Parameter,
    SplitMark,
    TraceSegment,
)

_STANDALONE_KINDS = ("column", "row", "none")


@dataclass(frozen=True)
class _Linear:
    """The weight of a linear layer; `output_dim` is the dimension of the weight that has the output features."""

    weight: Parameter
    output_dim: int

    def group(self, module: str, row: bool) -> SplitGroup:
        dim = 1 - self.output_dim if row else self.output_dim
        size = self.weight.shape[dim]
        split = ParameterSplit(module, f"{module}.weight", "row" if row else "column", dim, size, module)
        return SplitGroup(module, size, (split,))


def with_standalone_splits(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile with a `SplitGroup` for each standalone layer that the plan names, and with `SplitMark`s on the
    layer's operators and memory changes. It is unchanged if the plan names none, or if the profile has their groups
    already. A name that fits no layer raises `InputError`, because the layer would otherwise silently stay whole.
    Pipeline stages are cut from the result for the whole model."""
    named = plan.modules.splits
    if not named or (profile.structure is None and all(split.kind == "none" for split in named.values())):
        return profile
    if profile.structure is None:
        raise InputError(f"plan.modules.splits.{next(iter(named))}: how this model can be split is not known")
    grouped = {split.module for group in profile.structure.splits for split in group.splits}
    linears = _linears(profile)
    standalone = {
        name: linear for name, linear in linears.items() if name not in grouped and plan.modules.split_of(name)
    }
    _check_names(plan, grouped | standalone.keys(), grouped | linears.keys())
    if not standalone:
        return profile
    groups = tuple(_group(name, linear, plan) for name, linear in standalone.items())
    structure = replace(profile.structure, splits=(*profile.structure.splits, *groups))
    marks = {group.name: (standalone[group.name], group.splits[0].kind == "row") for group in groups}
    return replace(profile, structure=structure, segments=tuple(_mark_segment(s, marks) for s in profile.segments))


def is_standalone(group: SplitGroup) -> bool:
    """Whether the group is a standalone layer. Groups of the structure have several layers, are split by vocabulary, or
    come from the model's published plan."""
    split = group.splits[0]
    return len(group.splits) == 1 and split.kind in _STANDALONE_KINDS and split.source == "derived"


def _check_names(plan: Plan, splittable: set[str], layers: set[str]) -> None:
    for pattern, split in plan.modules.splits.items():
        only = Modules(splits={pattern: split})
        if not any(only.split_of(module) for module in splittable):
            raise InputError(
                f"plan.modules.splits.{pattern}: no layer of that name can be split{did_you_mean(pattern, layers)}"
            )


def _linears(profile: ModelProfile) -> dict[str, _Linear]:
    """The linear layers of the model by name."""
    weights = {name: parameter for parameter in profile.parameters for name in parameter.names}
    linears: dict[str, _Linear] = {}
    for segment in profile.segments:
        for operator in segment.operators if segment.phase == "forward" else ():
            if operator.kind != "matmul" or not operator.layer:
                continue
            *_, n, k = operator.shape
            for module in _modules(operator.layer, segment):
                weight = weights.get(f"{module}.weight")
                if weight is None or sorted(weight.shape) != sorted((n.constant, k.constant)) or n.linear or k.linear:
                    continue
                linears[module] = _Linear(weight, 0 if weight.shape[0] == n.constant else 1)
    return linears


def _modules(layer: str, segment: TraceSegment) -> Iterator[str]:
    """The names of the layer in all of the equal blocks of the segment."""
    if not segment.blocks or not is_inside(layer, segment.unit):
        yield layer
        return
    yield from (block + layer[len(segment.unit) :] for block in segment.blocks)


def _group(module: str, linear: _Linear, plan: Plan) -> SplitGroup:
    split = plan.modules.split_of(module)
    assert split is not None
    if split.kind not in _STANDALONE_KINDS:
        raise InputError(f"plan.modules.splits: {module} cannot be split by {split.kind}: choose column or row")
    if len(linear.weight.names) > 1 and split.kind != "none":
        others = ", ".join(name for name in linear.weight.names if name != f"{module}.weight")
        raise InputError(f"plan.modules.splits: {module} cannot be split by itself, its weight is {others} too")
    return linear.group(module, split.kind == "row")


# ---- what is divided with a standalone layer


def _mark_segment(segment: TraceSegment, marks: Mapping[str, tuple[_Linear, bool]]) -> TraceSegment:
    if not any(operator.layer in marks for operator in segment.operators):
        return segment
    operators = tuple(
        replace(operator, split=SplitMark(operator.layer)) if _is_divided(operator, marks) else operator
        for operator in segment.operators
    )
    changes = tuple(
        replace(change, split=SplitMark(change.layer))
        if _is_of_divided_weight(change.layer, change.bytes, marks)
        else change
        for change in segment.changes
    )
    return replace(segment, operators=operators, changes=changes)


def _is_divided(operator: Operator, marks: Mapping[str, tuple[_Linear, bool]]) -> bool:
    if operator.kind == "matmul":
        return operator.layer in marks
    sums_bias = operator.kind == "reduction" and operator.layer in marks and not marks[operator.layer][1]
    return sums_bias or _is_of_divided_weight(operator.layer, operator.bytes, marks)


def _is_of_divided_weight(layer: str, size: BatchPolynomial, marks: Mapping[str, tuple[_Linear, bool]]) -> bool:
    """Whether `size` belongs to a divided parameter of the layer, its gradient or a cast of either. In a `row` layer
    that is only the weight: its bias stays whole, and is recognized because it is smaller."""
    if layer not in marks or size.linear or size.square:
        return False
    linear, row = marks[layer]
    return not row or abs(size.constant) % prod(linear.weight.shape) == 0


# ---- what it keeps in memory


def with_saved_inputs(
    profile: ModelProfile, segments: tuple[TraceSegment, ...], extra_inputs: Mapping[str, float]
) -> tuple[TraceSegment, ...]:
    """The segments of a rank with more saved memory: each layer in `extra_inputs` saves that many times the bytes of
    its input in addition, for the gradient of its weight. A layer in a recomputed block saves them from the
    recomputation in the backward pass on."""
    frozen = {name for p in profile.parameters if not p.trainable for name in p.names}
    sizes: dict[str, BatchPolynomial] = {}
    for segment in profile.segments:
        for operator in segment.operators if segment.phase == "forward" else ():
            factor = extra_inputs.get(operator.layer, 0.0)
            if factor and operator.kind == "matmul" and f"{operator.layer}.weight" not in frozen:
                sizes[operator.layer] = _add(sizes.get(operator.layer), _input_bytes(operator).scaled(factor))
    return tuple(_save_inputs(segment, sizes, profile) for segment in segments)


def _save_inputs(segment: TraceSegment, sizes: Mapping[str, BatchPolynomial], profile: ModelProfile) -> TraceSegment:
    changes: list[MemoryChange] = []
    for layer, size in sizes.items():
        positions = [n for n, o in enumerate(segment.operators) if o.layer == layer and o.kind == "matmul"]
        recomputed = profile.recompute != "none" and any(is_inside(layer, block) for block in profile.blocks)
        if not positions or (recomputed and segment.phase == "forward"):
            continue
        role: MemoryRole = "temporary" if recomputed else "saved"
        if recomputed or segment.phase == "forward":
            changes.append(MemoryChange(positions[0], size, role, layer))
        if segment.phase == "backward":
            changes.append(MemoryChange(positions[-1] + 1, size.scaled(-1.0), role, layer))
    if not changes:
        return segment
    return replace(
        segment, changes=tuple(sorted((*segment.changes, *changes), key=lambda change: change.after_operators))
    )


def _input_bytes(operator: Operator) -> BatchPolynomial:
    count, m, _, k = operator.shape
    growing, fixed = (count, m) if count.linear or count.square else (m, count)
    return growing.scaled(fixed.constant * k.constant * ITEM_BYTES.get(operator.dtype, 4))


def _add(left: BatchPolynomial | None, right: BatchPolynomial) -> BatchPolynomial:
    if left is None:
        return right
    return BatchPolynomial(left.constant + right.constant, left.linear + right.linear, left.square + right.square)

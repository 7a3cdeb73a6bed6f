"""Linear layers that a plan splits by themselves: those that it names and no group of the model's structure has.

A group hands its parts on from layer to layer until they are summed up; those of a lone layer are put together behind
it (crossings.py). Once marked (`with_lone`), a lone layer is a group like the others. Of its operators and memory:

    column   weight and bias, their gradients and casts are divided; the input is kept whole, also where the values
             around the layer are divided, by samples or along the sequence                               kept_inputs
    row      the weight, its gradient and its casts are divided; what is kept of the input is as large as before
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.blocks.module_names import within
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Modules, Plan
from meshwright.profile.structure.splits import Split, SplitGroup
from meshwright.profile.values import ITEM_BYTES, Change, Growth, ModelProfile, Operator, Parameter, Role, Stretch

_KINDS = ("column", "row", "none")


@dataclass(frozen=True)
class _Linear:
    """`outputs` is the dimension of the weight that has the output features."""

    weight: Parameter
    outputs: int

    def group(self, module: str, row: bool) -> SplitGroup:
        dim = 1 - self.outputs if row else self.outputs
        size = self.weight.shape[dim]
        split = Split(module, f"{module}.weight", "row" if row else "column", dim, size, module)
        return SplitGroup(module, size, (split,))


def with_lone(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile with a group for each lone layer that the plan names; itself where it names none, or has them.
    A name that fits nothing is an `InputError`: it would be left whole in silence. Of a pipeline, the stages are
    made of what this returns for the whole model."""
    named = plan.modules.splits
    if not named or (profile.structure is None and all(split.kind == "none" for split in named.values())):
        return profile
    if profile.structure is None:
        raise InputError(f"plan.modules.splits.{next(iter(named))}: how this model can be split is not known")
    taken = {split.module for group in profile.structure.splits for split in group.splits}
    linears = _linears(profile)
    lone = {name: linear for name, linear in linears.items() if name not in taken and plan.modules.split_of(name)}
    _check_names(plan, taken | lone.keys(), taken | linears.keys())
    if not lone:
        return profile
    groups = tuple(_group(name, linear, plan) for name, linear in lone.items())
    structure = replace(profile.structure, splits=(*profile.structure.splits, *groups))
    marks = {group.name: (lone[group.name], group.splits[0].kind == "row") for group in groups}
    return replace(profile, structure=structure, stretches=tuple(_marked(s, marks) for s in profile.stretches))


def is_lone(group: SplitGroup) -> bool:
    """What the structure has derived is split together with other layers, or by vocabulary."""
    split = group.splits[0]
    return len(group.splits) == 1 and split.kind in _KINDS and split.source == "derived"


def _check_names(plan: Plan, found: set[str], known: set[str]) -> None:
    for pattern, split in plan.modules.splits.items():
        alone = Modules(splits={pattern: split})
        if not any(alone.split_of(module) for module in found):
            raise InputError(
                f"plan.modules.splits.{pattern}: no layer of that name can be split{did_you_mean(pattern, known)}"
            )


def _linears(profile: ModelProfile) -> dict[str, _Linear]:
    weights = {name: parameter for parameter in profile.parameters for name in parameter.names}
    found: dict[str, _Linear] = {}
    for stretch in profile.stretches:
        for operator in stretch.operators if stretch.phase == "forward" else ():
            if operator.kind != "matmul" or not operator.layer:
                continue
            *_, n, k = operator.shape
            for module in _modules(operator.layer, stretch):
                weight = weights.get(f"{module}.weight")
                if weight is None or sorted(weight.shape) != sorted((n.constant, k.constant)) or n.linear or k.linear:
                    continue
                found[module] = _Linear(weight, 0 if weight.shape[0] == n.constant else 1)
    return found


def _modules(layer: str, stretch: Stretch) -> Iterator[str]:
    """The layer, in each of the equal blocks that the stretch stands for."""
    if not stretch.blocks or not within(layer, stretch.unit):
        yield layer
        return
    yield from (block + layer[len(stretch.unit) :] for block in stretch.blocks)


def _group(module: str, linear: _Linear, plan: Plan) -> SplitGroup:
    split = plan.modules.split_of(module)
    assert split is not None
    if split.kind not in _KINDS:
        raise InputError(f"plan.modules.splits: {module} cannot be split by {split.kind}: choose column or row")
    if len(linear.weight.names) > 1 and split.kind != "none":
        others = ", ".join(name for name in linear.weight.names if name != f"{module}.weight")
        raise InputError(f"plan.modules.splits: {module} cannot be split by itself, its weight is {others} too")
    return linear.group(module, split.kind == "row")


# ---- what is divided with a lone layer


def _marked(stretch: Stretch, marks: Mapping[str, tuple[_Linear, bool]]) -> Stretch:
    if not any(operator.layer in marks for operator in stretch.operators):
        return stretch
    operators = tuple(
        replace(operator, split=operator.layer) if _is_divided(operator, marks) else operator
        for operator in stretch.operators
    )
    changes = tuple(
        replace(change, split=change.layer) if _is_weights(change.layer, change.bytes, marks) else change
        for change in stretch.changes
    )
    return replace(stretch, operators=operators, changes=changes)


def _is_divided(operator: Operator, marks: Mapping[str, tuple[_Linear, bool]]) -> bool:
    if operator.kind == "matmul":
        return operator.layer in marks
    sums_bias = operator.kind == "reduction" and operator.layer in marks and not marks[operator.layer][1]
    return sums_bias or _is_weights(operator.layer, operator.bytes, marks)


def _is_weights(layer: str, size: Growth, marks: Mapping[str, tuple[_Linear, bool]]) -> bool:
    """Whether it is the weight, its gradient or a cast of either; a row's bias, which is whole, is less."""
    if layer not in marks or size.linear or size.square:
        return False
    linear, row = marks[layer]
    return not row or abs(size.constant) % prod(linear.weight.shape) == 0


# ---- what stays in memory for it


def kept_inputs(
    profile: ModelProfile, stretches: tuple[Stretch, ...], more: Mapping[str, float]
) -> tuple[Stretch, ...]:
    """A rank's stretches of this whole model, where each of these layers keeps so many times `more` of its input for
    the gradient of its weight; from the pass that computes it again on, where a block does."""
    frozen = {name for p in profile.parameters if not p.trainable for name in p.names}
    sizes: dict[str, Growth] = {}
    for stretch in profile.stretches:
        for operator in stretch.operators if stretch.phase == "forward" else ():
            factor = more.get(operator.layer, 0.0)
            if factor and operator.kind == "matmul" and f"{operator.layer}.weight" not in frozen:
                sizes[operator.layer] = _plus(sizes.get(operator.layer), _input(operator).times(factor))
    return tuple(_keeping(stretch, sizes, profile) for stretch in stretches)


def _keeping(stretch: Stretch, sizes: Mapping[str, Growth], profile: ModelProfile) -> Stretch:
    added: list[Change] = []
    for layer, size in sizes.items():
        places = [n for n, o in enumerate(stretch.operators) if o.layer == layer and o.kind == "matmul"]
        again = profile.recompute != "none" and any(within(layer, block) for block in profile.blocks)
        if not places or (again and stretch.phase == "forward"):
            continue
        role: Role = "temporary" if again else "saved"
        if again or stretch.phase == "forward":
            added.append(Change(places[0], size, role, layer))
        if stretch.phase == "backward":
            added.append(Change(places[-1] + 1, size.times(-1.0), role, layer))
    if not added:
        return stretch
    return replace(stretch, changes=tuple(sorted((*stretch.changes, *added), key=lambda change: change.operator)))


def _input(operator: Operator) -> Growth:
    many, m, _, k = operator.shape
    growing, fixed = (many, m) if many.linear or many.square else (m, many)
    return growing.times(fixed.constant * k.constant * ITEM_BYTES.get(operator.dtype, 4))


def _plus(one: Growth | None, other: Growth) -> Growth:
    if one is None:
        return other
    return Growth(one.constant + other.constant, one.linear + other.linear, one.square + other.square)

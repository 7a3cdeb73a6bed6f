"""What one rank computes of a model whose modules are split: the model's profile, with the rank's share of each part.

Over the tensor axis of t ranks, of a group of modules that is split:

    parameters, gradients   1/t         work   1/t         values inside the group   1/t         its input   whole
    with `sequence`, everything between the groups   1/t; with `loss`, the scores up to the loss   1/t

Over the replicate axis of r ranks, each rank works on the samples of all of them:

    parameters, gradients   1/r         work   r · 1/r     values inside the group   r · 1/r     its input   r

Groups are those of the model's structure, and single layers that the plan names (lone.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.structure.marks import INTO, LOSS
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.values import ITEM_BYTES, Change, Growth, ModelProfile, Operator, Parameter
from meshwright.simulator.tensor.standalone_splits import is_lone, kept_inputs, with_lone

_DIVIDED_BY_SEQUENCE = ("norm", "elementwise", "copy", "reduction")


@dataclass(frozen=True)
class Share:
    """A rank's part of a group: of its parameters, of its work and the values inside, and how many ranks' samples
    its input holds."""

    axis: str
    ranks: int
    parameters: float
    work: float
    input: float


def shares(profile: ModelProfile, plan: Plan) -> dict[str, Share]:
    """The groups that the plan splits, by name."""
    found: dict[str, Share] = {}
    structure = with_lone(profile, plan).structure
    for group in structure.splits if structure else ():
        named = [split for member in group.splits if (split := plan.modules.split_of(member.module)) is not None]
        if any(split.kind == "none" for split in named):
            continue
        axis = named[0].axis if named else "tensor"
        ranks = plan.axes.replicate if axis == "replicate" else plan.axes.tensor
        if ranks == 1:
            continue
        if group.degree % ranks and not _by_vocabulary(group):
            if not named:
                continue
            raise InputError(
                f"{group.name} cannot be split over {ranks} ranks: they must divide {group.degree}"
                f" ({'its heads' if group.heads else 'its features'})"
            )
        whole = axis == "replicate"
        found[group.name] = Share(axis, ranks, 1 / ranks, 1.0 if whole else 1 / ranks, float(ranks) if whole else 1.0)
    return found


def _by_vocabulary(group: SplitGroup) -> bool:
    return all(split.kind == "vocabulary" for split in group.splits)


def kept_out(profile: ModelProfile, plan: Plan) -> frozenset[str]:
    """Parameters that are divided over the replicate axis. Each rank has seen the samples of all, so their gradients
    are not combined; biases of `row` layers stay whole, and are added to a rank's own samples."""
    if not any(split.axis == "replicate" for split in plan.modules.splits.values()):
        return frozenset()
    active = shares(profile, plan)
    structure = with_lone(profile, plan).structure
    divided = {
        name
        for group in (structure.splits if structure else ())
        if group.name in active and active[group.name].axis == "replicate"
        for split in group.splits
        for name in (split.parameter, *([] if split.kind == "row" else [f"{split.module}.bias"]))
    }
    return frozenset(p.names[0] for p in profile.parameters if not divided.isdisjoint(p.names))


def split_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The rank's share of the whole model; the profile itself where the plan splits nothing."""
    profile = with_lone(profile, plan)
    active = shares(profile, plan)
    sequence = plan.axes.tensor if plan.modules.sequence else 1
    if not active and sequence == 1:
        return profile
    assert profile.structure is not None
    groups = {group.name: group for group in profile.structure.splits if group.name in active}
    homes = {split.module: active[name] for name, group in groups.items() for split in group.splits}

    def own(operator: Operator) -> Operator:
        home = homes.get(operator.layer) if not operator.split else None
        if home and operator.kind == "embedding":
            return _table(operator, home)
        if home and operator.kind == "elementwise" and _is_fixed(operator.bytes):
            return _lessened(operator, home.parameters)  # gradients of a weight that is used twice, added up
        return _operator(operator, active, groups, sequence, plan.modules.loss)

    stretches = tuple(
        replace(
            stretch,
            operators=tuple(map(own, stretch.operators)),
            changes=tuple(_change(c, active, sequence, plan.modules.loss) for c in stretch.changes),
        )
        for stretch in profile.stretches
    )
    gathering = [group for group in groups.values() if is_lone(group) and group.splits[0].kind == "column"]
    more = {group.name: active[group.name].input - 1 / sequence for group in gathering}
    if any(more.values()):
        stretches = kept_inputs(profile, stretches, more)
    return replace(profile, stretches=stretches, parameters=_parameters(profile, active))


def _parameters(profile: ModelProfile, active: Mapping[str, Share]) -> tuple[Parameter, ...]:
    assert profile.structure is not None
    divided: dict[str, tuple[int, float]] = {}
    for group in profile.structure.splits:
        share = active.get(group.name)
        for split in group.splits if share else ():
            divided[split.parameter] = (split.dim, share.parameters if share else 1.0)
            if split.kind != "row":
                divided[f"{split.module}.bias"] = (0, share.parameters if share else 1.0)
    return tuple(_parameter(parameter, divided) for parameter in profile.parameters)


def _parameter(parameter: Parameter, divided: Mapping[str, tuple[int, float]]) -> Parameter:
    found = next((divided[name] for name in parameter.names if name in divided), None)
    if found is None:
        return parameter
    dim, part = found
    size = -int(-parameter.shape[dim] * part // 1)  # the largest rank's
    shape = (*parameter.shape[:dim], size, *parameter.shape[dim + 1 :])
    return replace(parameter, shape=shape, bytes=parameter.bytes * prod(shape) // max(prod(parameter.shape), 1))


def _share(split: str, active: Mapping[str, Share], loss: bool) -> Share | None:
    if split.startswith(LOSS):
        return active.get(split.removeprefix(LOSS)) if loss else None
    return active.get(split)


def _change(change: Change, active: Mapping[str, Share], sequence: int, loss: bool) -> Change:
    into = active.get(change.split.removeprefix(INTO)) if change.split.startswith(INTO) else None
    share = _share(change.split, active, loss)
    if into is not None:
        part = into.input
    elif share is not None:
        part = share.parameters if change.role == "gradient" or _is_fixed(change.bytes) else share.work
    elif change.role != "gradient" and not change.split.startswith(LOSS):
        part = 1 / sequence
    else:
        part = 1.0
    return change if part == 1.0 else replace(change, bytes=change.bytes.times(part))


def _operator(
    operator: Operator, active: Mapping[str, Share], groups: Mapping[str, SplitGroup], sequence: int, loss: bool
) -> Operator:
    share = _share(operator.split, active, loss)
    if share is None:
        along = sequence > 1 and not operator.split and operator.kind in _DIVIDED_BY_SEQUENCE
        return _lessened(operator, 1 / sequence) if along else operator
    if operator.kind == "matmul":
        sizes = {split.size for split in groups[operator.split.removeprefix(LOSS)].splits}
        return _product(operator, share, sizes)
    if operator.kind == "attention" and share.work < 1:
        shape = tuple(size.times(share.work) if place == 1 else size for place, size in enumerate(operator.shape))
        return replace(_lessened(operator, share.work), shape=shape)
    part = share.parameters if _is_fixed(operator.bytes) else share.work
    return _lessened(operator, part) if part < 1 else operator


def _table(operator: Operator, share: Share) -> Operator:
    """A rank has some of the words, and looks for all that it is asked for: the rest are zeros."""
    rows = operator.bytes.constant * share.parameters
    moved = Growth(rows, operator.bytes.linear * share.input, operator.bytes.square * share.input)
    part = share.parameters if all(map(_is_fixed, operator.shape)) else share.input
    return replace(operator, bytes=moved, shape=tuple(size.times(part) for size in operator.shape))


def _is_fixed(size: Growth) -> bool:
    """Weights and casts of them, whose part is each rank's own also where the samples of all ranks are gathered."""
    return not size.linear and not size.square


def _product(operator: Operator, share: Share, sizes: set[int]) -> Operator:
    """One of m, n and k is divided: the one of a size that the group divides, else the batch of products. Where the
    ranks' samples are gathered, the one that grows with them is as much longer."""
    batch, *mnk = operator.shape
    fixed = [place for place, size in enumerate(mnk) if not size.linear and not size.square]
    place = next((p for p in (1, 2, 0) if p in fixed and int(mnk[p].constant) in sizes), None)
    if place is None:
        return _lessened(replace(operator, shape=(batch.times(share.work), *mnk)), share.work)
    made = [size.times(share.parameters) if p == place else size for p, size in enumerate(mnk)]
    made = [size.times(share.input) if p not in fixed else size for p, size in enumerate(made)]
    m, n, k = made
    item = ITEM_BYTES.get(operator.dtype, 4)
    bytes_moved = _sum(_multiplied(m, k), _multiplied(k, n), _multiplied(m, n))
    return replace(
        operator, flops=operator.flops.times(share.work), bytes=bytes_moved.times(item), shape=(batch, *made)
    )


def _lessened(operator: Operator, part: float) -> Operator:
    shape = operator.shape if len(operator.shape) != 1 else (operator.shape[0].times(part),)
    return replace(operator, flops=operator.flops.times(part), bytes=operator.bytes.times(part), shape=shape)


def _multiplied(one: Growth, other: Growth) -> Growth:
    """Of two sizes at most one grows with the batch, or both in a straight line."""
    return Growth(
        one.constant * other.constant,
        one.constant * other.linear + one.linear * other.constant,
        one.linear * other.linear + one.constant * other.square + one.square * other.constant,
    )


def _sum(*growths: Growth) -> Growth:
    return Growth(sum(g.constant for g in growths), sum(g.linear for g in growths), sum(g.square for g in growths))

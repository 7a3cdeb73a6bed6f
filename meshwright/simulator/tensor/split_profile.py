"""Scales the profile of a model to the share that one rank computes when modules are split.

Over a tensor axis of t ranks, each rank has of a group of modules that are split together (`SplitGroup`):

    parameters, gradients   1/t         work   1/t         values inside the group   1/t         its input   whole
    with `sequence`, if samples have several tokens, everything between the groups   1/t
    with `loss`, the scores up to the loss   1/t
    experts that no group splits: every rank gathers the tokens of all, and computes the same rows   whole

Over a replicate axis of r ranks, each rank computes with the samples of all of them:

    parameters, gradients   1/r         work   r · 1/r     values inside the group   r · 1/r     its input   r

The groups are those of the model's structure, and the standalone layers that the plan names (standalone_splits.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from math import prod

from meshwright.blocks.module_names import enclosing_modules
from meshwright.dtypes import ITEM_BYTES
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, Parameter, SplitMark
from meshwright.simulator.profile_cache import ProfileCache
from meshwright.simulator.tensor.standalone_splits import is_standalone, with_saved_inputs, with_standalone_splits

_SPLIT_PROFILES: ProfileCache[ModelProfile] = ProfileCache(48)
_DIVIDED_BY_SEQUENCE = ("norm", "elementwise", "copy", "reduction")


@dataclass(frozen=True)
class SplitShare:
    """The share of a split group that one rank has: `parameters` is the share of its parameters, `work` that of its
    compute and of the values inside the group, relative to one rank's samples. `input` is the number of ranks whose
    samples the input of the group contains. The group is split over `ranks` ranks of `axis`."""

    axis: str
    ranks: int
    parameters: float
    work: float
    input: float


def split_shares(profile: ModelProfile, plan: Plan) -> dict[str, SplitShare]:
    """One rank's share of each group that the plan splits, by the name of the group. Raises `InputError` if the plan
    names a layer that the ranks cannot divide."""
    shares: dict[str, SplitShare] = {}
    structure = with_standalone_splits(profile, plan).structure
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
        gathers_samples = axis == "replicate"
        shares[group.name] = SplitShare(
            axis, ranks, 1 / ranks, 1.0 if gathers_samples else 1 / ranks, float(ranks) if gathers_samples else 1.0
        )
    return shares


def _by_vocabulary(group: SplitGroup) -> bool:
    return all(split.kind == "vocabulary" for split in group.splits)


def replicate_split_parameters(profile: ModelProfile, plan: Plan) -> frozenset[str]:
    """The names of the parameters that are split over the replicate axis. Their gradients are not combined between
    ranks, because each rank computes them from the samples of all ranks. The biases of `row` layers are not among them:
    they stay whole and are added to a rank's own samples."""
    if not any(split.axis == "replicate" for split in plan.modules.splits.values()):
        return frozenset()
    shares = split_shares(profile, plan)
    structure = with_standalone_splits(profile, plan).structure
    divided = {
        name
        for group in (structure.splits if structure else ())
        if group.name in shares and shares[group.name].axis == "replicate"
        for split in group.splits
        for name in (split.parameter, *([] if split.kind == "row" else [f"{split.module}.bias"]))
    }
    return frozenset(p.names[0] for p in profile.parameters if not divided.isdisjoint(p.names))


def split_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile of one rank's share of the model; the profile of the whole model if the plan splits nothing."""
    axes, modules = plan.axes, plan.modules
    named = tuple((name, split.kind, split.axis) for name, split in modules.splits.items())
    key = (axes.tensor, axes.replicate if named else 1, modules.sequence, modules.loss, named)
    return _SPLIT_PROFILES.get(profile, key, lambda: _split_profile(profile, plan))


def _split_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    profile = with_standalone_splits(profile, plan)
    shares = split_shares(profile, plan)
    sequence = plan.axes.tensor if plan.modules.sequence and _has_tokens(profile) else 1
    if not shares and sequence == 1:
        return profile
    assert profile.structure is not None
    groups = {group.name: group for group in profile.structure.splits if group.name in shares}
    share_of_module = {split.module: shares[name] for name, group in groups.items() for split in group.splits}
    experts = {module for layer in profile.experts for module in layer.modules}

    @cache
    def sequence_of(layer: str) -> int:
        """The number of ranks that divide the sequence where this layer computes."""
        return 1 if experts and not experts.isdisjoint(enclosing_modules(layer)) else sequence

    def scale_operator(operator: Operator) -> Operator:
        share = share_of_module.get(operator.layer) if not operator.split else None
        if share and operator.kind == "embedding":
            return _scale_embedding(operator, share)
        if share and operator.kind == "elementwise" and _is_fixed(operator.bytes):
            return _scale(operator, share.parameters)  # adds up the gradients of a weight that is used twice
        return _scale_in_group(operator, shares, groups, sequence_of(operator.layer), plan.modules.loss)

    segments = tuple(
        replace(
            segment,
            operators=tuple(map(scale_operator, segment.operators)),
            changes=tuple(_scale_change(c, shares, sequence_of(c.layer), plan.modules.loss) for c in segment.changes),
        )
        for segment in profile.segments
    )
    gathered_inputs = [group for group in groups.values() if is_standalone(group) and group.splits[0].kind == "column"]
    extra_inputs = {group.name: shares[group.name].input - 1 / sequence for group in gathered_inputs}
    if any(extra_inputs.values()):
        segments = with_saved_inputs(profile, segments, extra_inputs)
    return replace(profile, segments=segments, parameters=_split_parameters(profile, shares))


def rows_of_sample(product: Operator) -> int:
    """The rows of a matrix product for one sample."""
    count, rows, *_ = product.shape
    return round(count.constant * rows.linear + count.linear * rows.constant)


def _has_tokens(profile: ModelProfile) -> bool:
    """Whether a layer that can be split computes several rows for a sample. Otherwise there is no sequence that ranks
    could divide."""
    groups = profile.structure.splits if profile.structure else ()
    modules = {split.module for group in groups for split in group.splits}
    return any(
        operator.kind == "matmul" and operator.layer in modules and rows_of_sample(operator) > 1
        for segment in profile.segments
        if segment.phase == "forward"
        for operator in segment.operators
    )


def _split_parameters(profile: ModelProfile, shares: Mapping[str, SplitShare]) -> tuple[Parameter, ...]:
    assert profile.structure is not None
    divided: dict[str, tuple[int, float]] = {}
    for group in profile.structure.splits:
        share = shares.get(group.name)
        for split in group.splits if share else ():
            divided[split.parameter] = (split.dim, share.parameters if share else 1.0)
            if split.kind != "row":
                divided[f"{split.module}.bias"] = (0, share.parameters if share else 1.0)
    return tuple(_split_parameter(parameter, divided) for parameter in profile.parameters)


def _split_parameter(parameter: Parameter, divided: Mapping[str, tuple[int, float]]) -> Parameter:
    division = next((divided[name] for name in parameter.names if name in divided), None)
    if division is None:
        return parameter
    dim, share = division
    size = -int(-parameter.shape[dim] * share // 1)  # the size on the rank that has most
    shape = (*parameter.shape[:dim], size, *parameter.shape[dim + 1 :])
    return replace(parameter, shape=shape, bytes=parameter.bytes * prod(shape) // max(prod(parameter.shape), 1))


def _share(split: SplitMark | None, shares: Mapping[str, SplitShare], loss: bool) -> SplitShare | None:
    if split is None or split.part == "whole_input" or (split.part == "divided_with_loss" and not loss):
        return None
    return shares.get(split.group)


def _scale_change(change: MemoryChange, shares: Mapping[str, SplitShare], sequence: int, loss: bool) -> MemoryChange:
    split = change.split
    into = shares.get(split.group) if split and split.part == "whole_input" else None
    share = _share(split, shares, loss)
    if into is not None:
        part = into.input
    elif share is not None:
        part = share.parameters if change.role == "gradient" or _is_fixed(change.bytes) else share.work
    elif change.role != "gradient" and not (split and split.part == "divided_with_loss"):
        part = 1 / sequence
    else:
        part = 1.0
    return change if part == 1.0 else replace(change, bytes=change.bytes.scaled(part))


def _scale_in_group(
    operator: Operator, shares: Mapping[str, SplitShare], groups: Mapping[str, SplitGroup], sequence: int, loss: bool
) -> Operator:
    """The operator as one rank runs it: with the rank's share of a group of split layers, or, outside of such groups,
    with its share of the tokens if `sequence` ranks divide them."""
    share = _share(operator.split, shares, loss)
    if share is None or operator.split is None:
        is_divided = sequence > 1 and not operator.split and operator.kind in _DIVIDED_BY_SEQUENCE
        return _scale(operator, 1 / sequence) if is_divided else operator
    if operator.kind == "matmul":
        sizes = {split.size for split in groups[operator.split.group].splits}
        return _scale_product(operator, share, sizes)
    if operator.kind == "attention" and share.work < 1:
        shape = tuple(size.scaled(share.work) if place == 1 else size for place, size in enumerate(operator.shape))
        return replace(_scale(operator, share.work), shape=shape)
    part = share.parameters if _is_fixed(operator.bytes) else share.work
    return _scale(operator, part) if part < 1 else operator


def _scale_embedding(operator: Operator, share: SplitShare) -> Operator:
    """The operator of an embedding that is split by vocabulary. A rank has some rows of the table and looks up all
    tokens; the results of tokens that other ranks have are zeros."""
    rows = operator.bytes.constant * share.parameters
    moved = BatchPolynomial(rows, operator.bytes.linear * share.input, operator.bytes.square * share.input)
    part = share.parameters if all(map(_is_fixed, operator.shape)) else share.input
    return replace(operator, bytes=moved, shape=tuple(size.scaled(part) for size in operator.shape))


def _is_fixed(size: BatchPolynomial) -> bool:
    """Whether a size does not grow with the batch. Such a size belongs to weights or their casts, and does not grow
    either when the samples of several ranks are gathered."""
    return not size.linear and not size.square


def _scale_product(operator: Operator, share: SplitShare, sizes: set[int]) -> Operator:
    """One rank's share of a matrix product. Of the sizes m, n and k, the one that the group splits is divided; if it
    splits none of them, the number of products is divided. If the samples of all ranks are gathered, the size that
    grows with the batch is multiplied by the number of ranks."""
    batch, *mnk = operator.shape
    fixed = [place for place, size in enumerate(mnk) if not size.linear and not size.square]
    place = next((p for p in (1, 2, 0) if p in fixed and int(mnk[p].constant) in sizes), None)
    if place is None:
        return _scale(replace(operator, shape=(batch.scaled(share.work), *mnk)), share.work)
    scaled = [size.scaled(share.parameters) if p == place else size for p, size in enumerate(mnk)]
    scaled = [size.scaled(share.input) if p not in fixed else size for p, size in enumerate(scaled)]
    m, n, k = scaled
    item = ITEM_BYTES.get(operator.dtype, 4)
    bytes_moved = _sum(_multiply(m, k), _multiply(k, n), _multiply(m, n))
    return replace(
        operator, flops=operator.flops.scaled(share.work), bytes=bytes_moved.scaled(item), shape=(batch, *scaled)
    )


def _scale(operator: Operator, part: float) -> Operator:
    shape = operator.shape if len(operator.shape) != 1 else (operator.shape[0].scaled(part),)
    return replace(operator, flops=operator.flops.scaled(part), bytes=operator.bytes.scaled(part), shape=shape)


def _multiply(left: BatchPolynomial, right: BatchPolynomial) -> BatchPolynomial:
    """The product of two polynomials. Terms above the square are dropped, so the degrees must add up to at most two."""
    return BatchPolynomial(
        left.constant * right.constant,
        left.constant * right.linear + left.linear * right.constant,
        left.linear * right.linear + left.constant * right.square + left.square * right.constant,
    )


def _sum(*polynomials: BatchPolynomial) -> BatchPolynomial:
    return BatchPolynomial(
        sum(p.constant for p in polynomials), sum(p.linear for p in polynomials), sum(p.square for p in polynomials)
    )

"""Reduces a profile to the operators that take time when eager PyTorch executes the model: allocations are left out.
Casts of split weights are marked, so that each rank is charged only for casting its part of the weight.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile, Operator, SplitMark, TraceSegment
from meshwright.simulator.profile_cache import ProfileCache

ALLOCATION = "empty_like"
_EXECUTED_PROFILES: ProfileCache[ModelProfile] = ProfileCache(48)


def executed_profile(profile: ModelProfile) -> ModelProfile:
    """The profile with executed operators only. It is meant for predicting time and has no memory changes."""
    return _EXECUTED_PROFILES.get(profile, None, lambda: _executed_profile(profile))


def _executed_profile(profile: ModelProfile) -> ModelProfile:
    groups = split_group_of_modules(profile)
    segments = tuple(
        replace(
            segment,
            operators=tuple(
                mark_split_cast(operator, groups) if is_cast(operator) else operator
                for operator in segment.operators
                if operator.name != ALLOCATION
            ),
            changes=(),
        )
        for segment in profile.segments
    )
    return replace(profile, segments=segments)


def casts_weights(plan: Plan) -> bool:
    """Whether the shard axis gathers weights in the precision of the operators, which then do not cast them."""
    return plan.numerics.cast == "weights" and plan.axes.shard > 1


def without_weight_casts(profile: ModelProfile) -> ModelProfile:
    """The profile without casts of weights in forward passes, for plans for which `casts_weights` is true. Each rank
    casts its shard of the weights once, which is not counted; gradients are cast as before. It is meant for predicting
    time and has no memory changes."""
    return _EXECUTED_PROFILES.get(profile, "without weight casts", lambda: _without_weight_casts(profile))


def _without_weight_casts(profile: ModelProfile) -> ModelProfile:

    def runs(operator: Operator, segment: TraceSegment) -> bool:
        return segment.phase == "backward" or not (is_cast(operator) and is_of_weight(operator))

    segments = tuple(
        replace(segment, operators=tuple(o for o in segment.operators if runs(o, segment)), changes=())
        for segment in profile.segments
    )
    return replace(profile, segments=segments)


def split_group_of_modules(profile: ModelProfile) -> dict[str, str]:
    """A mapping from each module that can be split to the name of its `SplitGroup`; empty without a structure."""
    splits = profile.structure.splits if profile.structure else ()
    return {member.module: group.name for group in splits for member in group.splits}


def is_cast(operator: Operator) -> bool:
    return operator.kind == "copy" and operator.name == "_to_copy"


def is_of_weight(operator: Operator) -> bool:
    """Whether the operator works on a weight or its gradient, recognized by sizes that do not grow with the batch."""
    return all(not size.linear and not size.square for size in operator.shape)


def mark_split_cast(operator: Operator, groups: Mapping[str, str]) -> Operator:
    """Returns the cast of a split weight with the `SplitMark` of its group, and any other cast unchanged. `groups` is
    the result of `split_group_of_modules`."""
    if not is_of_weight(operator) or operator.split or operator.layer not in groups:
        return operator
    return replace(operator, split=SplitMark(groups[operator.layer]))

"""The operators of a profile that cost time when eager PyTorch executes it: allocations are left out, and casts of
split weights are marked, so that each rank is charged for its part of them.
"""

from collections.abc import Mapping
from dataclasses import replace

from meshwright.profile.values import ModelProfile, Operator, SplitMark

ALLOCATION = "empty_like"


def executed_profile(profile: ModelProfile) -> ModelProfile:
    """The profile with executed operators only, and without memory changes: it is for predicting time."""
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


def split_group_of_modules(profile: ModelProfile) -> dict[str, str]:
    """By module, the name of the group that it is split with."""
    splits = profile.structure.splits if profile.structure else ()
    return {member.module: group.name for group in splits for member in group.splits}


def is_cast(operator: Operator) -> bool:
    return operator.kind == "copy" and operator.name == "_to_copy"


def is_of_weight(operator: Operator) -> bool:
    """Whether the operator works on a weight or its gradient: its sizes do not grow with the batch."""
    return all(not size.linear and not size.square for size in operator.shape)


def mark_split_cast(operator: Operator, groups: Mapping[str, str]) -> Operator:
    """The cast of a split weight as a member of its group; any other cast unchanged."""
    if not is_of_weight(operator) or operator.split or operator.layer not in groups:
        return operator
    return replace(operator, split=SplitMark(groups[operator.layer]))

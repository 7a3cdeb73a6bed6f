"""In which proportions the ranks of the shard axis hold weights, gradients and optimizer state, so that a plan fits
into devices with different memory.

    m_r(x)      the memory that rank r needs if it holds the part x of what the shard axis divides; rises with x, and is
                the largest of several straight lines                                              group_memory
    l_c         the largest part that fits into all ranks with coordinate c on the shard axis      _largest_part
    parts       p_c = min(l_c, λ) with Σ p_c = 1: small devices are filled, all others hold equal parts. No other
                parts that fit have a smaller largest part, to which all are padded when they are exchanged     _parts
    proportions small whole numbers, nearly as the parts are, and not larger than l_c              _proportions
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.planner.inputs import PlanningInputs
from meshwright.profile.values import ModelProfile
from meshwright.simulator.data_ranks import DataRankGroup, data_rank_groups
from meshwright.simulator.predict import group_memory

SHARDS = "shares.shards"
_PADDED_ROUNDS = 3
_ROUNDS = 3  # of lines through two points of m_r, each of which leads to a larger part that fits
_MOST = 48  # the largest number of the proportions
_PADDING = 1.02  # by rounding to small numbers, shards may become so many times as large
_DIFFERENT = 0.95  # devices with at least this share of the memory of others count as equally large


def with_shards_by_memory(plan: Plan, inputs: PlanningInputs, profile: ModelProfile) -> Plan | None:
    """Returns the plan with shards in proportion to the memory that its devices have left; None if the plan cannot have
    such shards, or does not fit with any. In each round, buffers have the padding of the shards of the one before;
    whether the last ones fit, the prediction of the plan says."""
    axes = plan.axes
    if not _can_divide(axes, inputs) or plan.memory.offload != "none":
        return None
    groups = data_rank_groups(inputs.cluster, plan, inputs.global_batch)
    for _ in range(_PADDED_ROUNDS):
        limits = [1.0] * axes.shard
        for group in groups:
            part = _largest_part_of_group(group, plan, inputs, profile)
            for coordinate in {rank % axes.shard for rank in group.ranks}:
                limits[coordinate] = min(limits[coordinate], part)
        parts = _parts(limits)
        if parts is None:
            return None
        before = plan.shares.shards
        shards = _proportions(parts, limits)
        plan = plan.model_copy(update={"shares": plan.shares.model_copy(update={"shards": shards})})
        if shards == before:
            break
    return plan if plan.shares.uneven_shards else None


def capacity_for_states(axes: Axes, inputs: PlanningInputs) -> float:
    """The largest mean, over all ranks, of the bytes of weights, gradients and optimizer state that may fit. The stages
    of a pipeline and shards by memory differ in size; otherwise, all ranks need the same."""
    if axes.pipeline > 1:
        return inputs.largest_capacity_bytes
    if not _can_divide(axes, inputs):
        return inputs.capacity_bytes
    capacities = [inputs.capacity_of(node.device) * node.count * node.number for node in inputs.cluster.nodes]
    return sum(capacities) / inputs.cluster.device_count


def _can_divide(axes: Axes, inputs: PlanningInputs) -> bool:
    """Whether plans with these axes can have shards by memory."""
    memories = [node.device.memory_bytes for node in inputs.cluster.nodes]
    is_free = SHARDS not in inputs.constraints.fixed and inputs.optimizer.elementwise
    differ = min(memories) < _DIFFERENT * max(memories)
    return is_free and differ and axes.shard > 1 and axes.context == axes.expert == 1


def _largest_part_of_group(group: DataRankGroup, plan: Plan, inputs: PlanningInputs, profile: ModelProfile) -> float:
    capacities = [inputs.capacity_of(node.device) for node in group.nodes]

    def room(part: float) -> list[float]:
        """The bytes that are left on the device of each pipeline rank."""
        memory = group_memory(
            inputs.cluster, profile, plan, replace(group, shard_part=part), inputs.optimizer, inputs.runtime
        )
        return [capacity - rank.device_bytes for rank, capacity in zip(memory, capacities, strict=True)]

    return _largest_part(room)


def _largest_part(room: Callable[[float], list[float]]) -> float:
    """The largest part with which `room` is not negative on any rank, or a little less; 0 if there is none. A straight
    line through two points of a convex function lies above it in between: what fits by the line, does fit."""
    low, high = 0.0, 1.0
    at_low, at_high = room(low), room(high)
    if min(at_low) < 0:
        return 0.0
    if min(at_high) >= 0:
        return 1.0
    for _ in range(_ROUNDS):
        crossings = [
            low + (high - low) * first / (first - last) for first, last in zip(at_low, at_high, strict=True) if last < 0
        ]
        low = min(crossings)
        at_low = room(low)
        if min(at_low) < 0:  # by the rounding of the allocator
            return low * 0.99
    return low


def _parts(limits: Sequence[float]) -> list[float] | None:
    """Parts that add up to 1, as equal as the limits allow; None if the limits are too small."""
    if min(limits) <= 0 or sum(limits) < 1:
        return None
    left, remaining = 1.0, len(limits)
    level = left / remaining
    for limit in sorted(limits):
        level = left / remaining
        if limit >= level:
            break
        left, remaining = left - limit, remaining - 1
    return [min(limit, level) for limit in limits]


def _proportions(parts: Sequence[float], limits: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers in these proportions with which no part is above its limit, and the largest part is
    at most `_PADDING` times as large; if there are none up to `_MOST`, those with the largest number `_MOST`."""
    largest = max(parts)
    shards: tuple[int, ...] = ()
    for most in range(1, _MOST + 1):
        shards = tuple(max(1, int(most * part / largest + 1e-9)) for part in parts)
        fits = all(shard <= limit * sum(shards) for shard, limit in zip(shards, limits, strict=True))
        if fits and max(shards) <= _PADDING * largest * sum(shards):
            break
    return shards

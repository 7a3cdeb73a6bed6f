"""Which candidates keep constraints: the sizes of axes, schedules and numbers of microbatches. A fixed value is
proposed even where a free search would not try it, such as a tensor axis over several nodes."""

from collections.abc import Sequence
from math import isqrt
from typing import Any, TypeVar

from meshwright.plan_fields.groups import STAGES_PER_RANK
from meshwright.planner.inputs import PlanningInputs

_MOST_UNEVEN = 32  # chosen: up to this number, microbatches need not have equally many samples
_ScheduleAndStages = TypeVar("_ScheduleAndStages", bound=tuple[Any, int])


def fixed_or(inputs: PlanningInputs, axis: str, options: Sequence[int], whole: int) -> Sequence[int]:
    """The size at which the axis is fixed, if it divides `whole`; the options if the axis is free."""
    size = inputs.constraints.fixed.get(f"axes.{axis}")
    if size is None:
        return options
    return [size] if whole % size == 0 else []


def shard_sizes(inputs: PlanningInputs, data_ranks: int, options: Sequence[int]) -> Sequence[int]:
    """The sizes of the shard axis above 1 if it shares this number of ranks with the replicate axis."""
    replicate = inputs.constraints.fixed.get("axes.replicate")
    if replicate is not None:
        options = [data_ranks // replicate] if data_ranks % replicate == 0 else []
    sizes = fixed_or(inputs, "shard", options, data_ranks)
    return [size for size in sizes if size > 1 and (replicate is None or size * replicate == data_ranks)]


def schedules(
    inputs: PlanningInputs, ranks: int, known: Sequence[_ScheduleAndStages]
) -> "Sequence[_ScheduleAndStages | tuple[Any, int]]":
    """Of the `known` pairs of a schedule and the stages of a rank those that keep the constraints; and the pairs that
    only constraints ask for: zbv, and as many stages as fixed cuts make."""
    fixed = inputs.constraints.fixed
    schedule, cuts = fixed.get("pipeline.schedule"), fixed.get("pipeline.cuts")
    options: list[Any] = [pair for pair in known if schedule in (None, pair[0])]
    if schedule == "zbv":
        options = [("zbv", 2)]
    if not cuts:
        return options
    stages = len(cuts) + 1
    if stages % ranks:
        return []
    names = dict.fromkeys(name for name, _ in options)
    return [(name, stages // ranks) for name in names if STAGES_PER_RANK.get(name, stages // ranks) == stages // ranks]


def microbatch_counts(inputs: PlanningInputs, local_batch: int, pipelined: bool, even: bool) -> dict[float, int]:
    """The mean sizes of microbatches that a rank's share of a batch can be cut into, and how many there are of each. If
    `even`, all microbatches have equally many samples."""
    constraints = inputs.constraints
    fixed, field = constraints.fixed, "pipeline.microbatches" if pipelined else "memory.accumulation"
    if pipelined:
        accumulation = fixed.get("memory.accumulation", 1)
        if accumulation > 1 and not _divides(accumulation, local_batch, even):
            return {}
        local_batch = -(-local_batch // accumulation)
    elif fixed.get("pipeline.microbatches", 1) > 1 or fixed.get("pipeline.cuts"):
        return {}  # these need a pipeline
    count = fixed.get(field)
    if count is None:
        counts = [1] if inputs.compares_samples else _free_counts(local_batch, even)
    else:
        is_possible = _divides(count, local_batch, even) and (count == 1 or not inputs.compares_samples)
        counts = [count] if is_possible else []
    excluded = {value for name, value in constraints.excluded if name == field}
    return {local_batch / number: number for number in counts if number not in excluded}


def keeps_axes(inputs: PlanningInputs, sizes: Any) -> bool:
    """Whether axes have none of the sizes that are avoided, and shards are not of an avoided kind."""
    for name, value in inputs.constraints.excluded:
        group, field = name.split(".")
        if group == "axes" and getattr(sizes, field) == value:
            return False
        if name == "memory.sharding" and sizes.shard > 1 and sizes.sharding == value:
            return False
    return True


def _divides(count: int, local_batch: int, even: bool) -> bool:
    return local_batch % count == 0 if even else local_batch >= count


def _free_counts(local_batch: int, even: bool) -> list[int]:
    """The numbers of microbatches that are tried, the largest first: all divisors of the local batch. Unless `even` is
    True, also all numbers up to `_MOST_UNEVEN` and powers of two, of which some microbatches have one sample more than
    others."""
    powers = {1 << power for power in range(local_batch.bit_length())}
    few = range(1, min(local_batch, _MOST_UNEVEN) + 1)
    return sorted({*divisors(local_batch), *(() if even else (*powers, *few))}, reverse=True)


def divisors(number: int) -> list[int]:
    small = [size for size in range(1, isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})

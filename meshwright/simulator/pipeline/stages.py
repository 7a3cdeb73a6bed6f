"""The profile of a model, cut into profiles of its pipeline stages.

Every operator belongs to the piece of the model that ran it, and every piece to a stage. What the forward pass computes
between pieces belongs to the piece before, and what it computes ahead of them to the first. For each microbatch a stage
keeps the tensors that it received and those that it saved itself.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from meshwright.blocks.module_names import is_inside
from meshwright.errors import InputError, did_you_mean
from meshwright.profile.structure.cuts import Cut
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, Parameter, TraceSegment

_NO_BYTES = BatchPolynomial(0.0, 0.0)
_StageOf = Callable[[str], int | None]


@dataclass(frozen=True)
class StageProfile:
    """`received` and `sent` are the bytes of a microbatch that cross the cuts before and behind the stage."""

    profile: ModelProfile
    received: BatchPolynomial
    sent: BatchPolynomial


def stage_profiles(profile: ModelProfile, cuts: tuple[str, ...]) -> tuple[StageProfile, ...]:
    """The stages of a model with these cuts, each the name of the last piece of a stage; one stage without cuts."""
    if not cuts:
        return (StageProfile(profile, _NO_BYTES, _NO_BYTES),)
    structure = profile.structure
    assert structure is not None
    crossing = [_crossing_bytes(_find_cut(structure, name)) for name in cuts]
    profiles = _cut_profile(profile, _stage_of_module(structure, cuts), len(cuts) + 1)
    return tuple(
        StageProfile(stage, received, sent)
        for stage, received, sent in zip(profiles, [_NO_BYTES, *crossing], [*crossing, _NO_BYTES], strict=True)
    )


def _find_cut(structure: Structure, name: str) -> Cut:
    for cut in structure.cuts:
        if cut.after == name:
            return cut
    refused = next((no_cut for no_cut in structure.no_cuts if no_cut.after == name), None)
    if refused is not None:
        raise InputError(f"the model cannot be cut after {name}: {refused.reason}")
    names = [cut.after for cut in structure.cuts]
    raise InputError(f"the model cannot be cut after {name}{did_you_mean(name, names)}")


def _crossing_bytes(cut: Cut) -> BatchPolynomial:
    return BatchPolynomial(float(sum(value.bytes_fixed for value in cut.crossing)), float(cut.bytes_per_sample))


def _stage_of_module(structure: Structure, cuts: tuple[str, ...]) -> _StageOf:
    """A function that returns the stage of a module; None for a module with pieces of several stages, or of none."""
    ends = set(cuts)
    stage, stages = 0, {}
    for piece in structure.pieces:
        stages[piece] = stage
        stage += piece in ends
    cached: dict[str, int | None] = {}

    def stage_of(module: str) -> int | None:
        if module not in cached:
            cached[module] = _lookup(stages, module)
        return cached[module]

    return stage_of


def _lookup(stages: dict[str, int], module: str) -> int | None:
    name = module
    while name:
        if name in stages:
            return stages[name]
        name = name.rpartition(".")[0]
    inside = {stage for piece, stage in stages.items() if module and piece.startswith(f"{module}.")}
    return min(inside) if len(inside) == 1 else None


def _cut_profile(profile: ModelProfile, stage_of: _StageOf, stages: int) -> list[ModelProfile]:
    segments: list[list[TraceSegment]] = [[] for _ in range(stages)]
    # Stages of tensors that were allocated outside of the pieces and not yet freed, by role, layer and bytes.
    allocated: dict[tuple[str, str, BatchPolynomial], list[int]] = {}
    for segment in profile.segments:
        if segment.blocks:
            for stage, part in _cut_blocks(segment, profile, stage_of, stages):
                segments[stage].append(part)
            continue
        start = _neighbour_stage(segments, segment, stages)
        operator_stages = _operator_stages((o.layer for o in segment.operators), stage_of, start)
        change_stages = [
            _change_stages(change, profile, operator_stages, stage_of, start, allocated) for change in segment.changes
        ]
        for stage in range(stages):
            numbers = [number for number, at in enumerate(operator_stages) if at == stage]
            changes = [
                replace(change, tensor_count=counts[stage])
                for change, counts in zip(segment.changes, change_stages, strict=True)
                if stage in counts
            ]
            if numbers or changes:
                segments[stage].append(_restricted(segment, numbers, changes))
    parameter_stages = [_parameter_stages(parameter, stage_of) for parameter in profile.parameters]
    return [
        replace(
            profile,
            segments=tuple(segments[stage]),
            parameters=tuple(p for p, at in zip(profile.parameters, parameter_stages, strict=True) if stage in at),
            input_bytes=profile.input_bytes if stage in (0, stages - 1) else _NO_BYTES,
            buffer_bytes=profile.buffer_bytes // stages,
        )
        for stage in range(stages)
    ]


def _cut_blocks(
    segment: TraceSegment, profile: ModelProfile, stage_of: _StageOf, stages: int
) -> Iterator[tuple[int, TraceSegment]]:
    """The parts of a segment of equal blocks, each with its stage. A tensor that a block frees, though no block
    allocated it, is freed on the stage of its layer."""
    freed = {
        stage: [c for c in segment.changes if _stage_outside_blocks(c, profile, stage_of) == stage]
        for stage in range(stages)
    }
    for stage in range(stages):
        blocks = tuple(block for block in segment.blocks if (stage_of(block) or 0) == stage)
        if blocks:
            others = [change for at, changes in freed.items() if at != stage for change in changes]
            changes = tuple(change for change in segment.changes if change not in others)
            yield stage, replace(segment, blocks=blocks, changes=changes)
        elif freed[stage]:
            yield stage, replace(segment, blocks=(), operators=(), changes=tuple(freed[stage]))


def _stage_outside_blocks(change: MemoryChange, profile: ModelProfile, stage_of: _StageOf) -> int | None:
    """The stage of a tensor that no block allocated; None for one of a block."""
    if any(segment.blocks and is_inside(change.layer, segment.unit) for segment in profile.segments):
        return None
    return stage_of(change.layer)


def _neighbour_stage(segments: list[list[TraceSegment]], segment: TraceSegment, stages: int) -> int:
    """The stage where the segment before this one ended: in the forward pass the last one with segments of this pass,
    in the backward pass the first."""
    same_pass = [stage for stage in range(stages) if any(s.phase == segment.phase for s in segments[stage])]
    if segment.phase == "forward":
        return max(same_pass, default=0)
    return min(same_pass, default=stages - 1)


def _operator_stages(layers: Iterable[str], stage_of: _StageOf, start: int) -> list[int]:
    """The stage of each operator, given its layer: that of the operator before where the layer has none."""
    stages, current = [], start
    for layer in layers:
        stage = stage_of(layer)
        current = current if stage is None else stage
        stages.append(current)
    return stages


def _change_stages(
    change: MemoryChange,
    profile: ModelProfile,
    operator_stages: list[int],
    stage_of: _StageOf,
    start: int,
    allocated: dict[tuple[str, str, BatchPolynomial], list[int]],
) -> dict[int, int]:
    """How many of the tensors of a change are on which stage. Tensors that all blocks of a segment allocated are where
    each block is, and a tensor that was allocated between pieces is freed where it was allocated."""
    if change.tensor_count > 1:
        blocks = next(s.blocks for s in profile.segments if s.blocks and is_inside(change.layer, s.unit))
        return Counter(stage_of(block) or 0 for block in blocks)
    stage = stage_of(change.layer)
    if stage is None:
        size = change.bytes
        key = (change.role, change.layer, BatchPolynomial(abs(size.constant), abs(size.linear), abs(size.square)))
        if (size.constant < 0 or size.linear < 0) and allocated.get(key):
            return {allocated[key].pop(0): 1}
        place = min(max(change.after_operators - 1, 0), len(operator_stages) - 1)
        stage = operator_stages[place] if operator_stages else start
        allocated.setdefault(key, []).append(stage)
    return {stage: 1}


def _restricted(segment: TraceSegment, numbers: list[int], changes: list[MemoryChange]) -> TraceSegment:
    """The segment with the operators of these numbers, and these changes."""
    operators: tuple[Operator, ...] = tuple(segment.operators[number] for number in numbers)
    before = [bisect_left(numbers, change.after_operators) for change in changes]
    return replace(
        segment,
        operators=operators,
        changes=tuple(replace(change, after_operators=place) for change, place in zip(changes, before, strict=True)),
    )


def _parameter_stages(parameter: Parameter, stage_of: _StageOf) -> set[int]:
    """The stages of a parameter: a tied one is on every stage that uses it, one outside of the pieces on the first."""
    stages = {stage_of(name.rpartition(".")[0]) for name in parameter.names}
    return {stage for stage in stages if stage is not None} or {0}

"""Cuts the profile of a model into profiles of its pipeline stages.

A model consists of pieces: the modules that stages are made of (`Structure.pieces`). Every operator belongs to the
piece that ran it, and every piece to a stage. Operators that the forward pass runs between two pieces belong to the
piece before them, and operators before the first piece belong to the first piece. For each microbatch a stage keeps the
tensors that it received and those that it saved itself.
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
from meshwright.simulator.profile_cache import ProfileCache

_NO_BYTES = BatchPolynomial(0.0, 0.0)
_StageOf = Callable[[str], int | None]


@dataclass(frozen=True)
class StageProfile:
    """The profile of one pipeline stage. `received` and `sent` are the bytes that cross the cut before the stage and
    the cut behind it, as functions of the samples in a microbatch."""

    profile: ModelProfile
    received: BatchPolynomial
    sent: BatchPolynomial


_STAGES: ProfileCache[tuple[StageProfile, ...]] = ProfileCache(48)


def stage_profiles(profile: ModelProfile, cuts: tuple[str, ...]) -> tuple[StageProfile, ...]:
    """The stages of a model. Each cut is the name of the last piece of a stage; without cuts there is one stage."""
    return _STAGES.get(profile, cuts, lambda: _stage_profiles(profile, cuts))


def _stage_profiles(profile: ModelProfile, cuts: tuple[str, ...]) -> tuple[StageProfile, ...]:
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
    """A function that maps the name of a module to the number of its stage, or to None if the module contains pieces of
    several stages, or is in no piece and contains none."""
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
    # The stages of tensors that were allocated outside of all pieces and are not yet freed, by role, layer and bytes.
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
        numbers: list[list[int]] = [[] for _ in range(stages)]
        for number, stage in enumerate(operator_stages):
            numbers[stage].append(number)
        changes: list[list[MemoryChange]] = [[] for _ in range(stages)]
        for change, counts in zip(segment.changes, change_stages, strict=True):
            for stage, count in counts.items():
                changes[stage].append(replace(change, tensor_count=count))
        parts: dict[object, TraceSegment] = {}  # equal parts are the same object
        for stage in range(stages):
            if numbers[stage] or changes[stage]:
                key = tuple(numbers[stage]), tuple(changes[stage])
                if key not in parts:
                    parts[key] = _restricted(segment, numbers[stage], changes[stage])
                segments[stage].append(parts[key])
    parameters: list[list[Parameter]] = [[] for _ in range(stages)]
    for parameter in profile.parameters:
        for stage in _parameter_stages(parameter, stage_of):
            parameters[stage].append(parameter)
    return [
        replace(
            profile,
            segments=tuple(segments[stage]),
            parameters=tuple(parameters[stage]),
            input_bytes=profile.input_bytes if stage in (0, stages - 1) else _NO_BYTES,
            buffer_bytes=profile.buffer_bytes // stages,
        )
        for stage in range(stages)
    ]


def _cut_blocks(
    segment: TraceSegment, profile: ModelProfile, stage_of: _StageOf, stages: int
) -> Iterator[tuple[int, TraceSegment]]:
    """The parts of a segment of equal blocks that belong to each stage, each with the number of the stage. If a block
    frees a tensor that no block allocated, the tensor is freed on the stage of the layer that allocated it. Stages that
    free no such tensor share one tuple of changes."""
    units = [part.unit for part in profile.segments if part.blocks]
    freed: dict[int, list[MemoryChange]] = {}
    for change in segment.changes:
        stage = _stage_outside_blocks(change, units, stage_of)
        if stage is not None:
            freed.setdefault(stage, []).append(change)
    blocks_of_stage: dict[int, list[str]] = {}
    for block in segment.blocks:
        blocks_of_stage.setdefault(stage_of(block) or 0, []).append(block)

    def changes_without(others: list[MemoryChange]) -> tuple[MemoryChange, ...]:
        return tuple(change for change in segment.changes if change not in others) if others else segment.changes

    without_freed = changes_without([change for changes in freed.values() for change in changes])
    for stage in range(stages):
        if stage in blocks_of_stage:
            changes = without_freed
            if stage in freed:
                changes = changes_without([c for at, changes in freed.items() if at != stage for c in changes])
            yield stage, replace(segment, blocks=tuple(blocks_of_stage[stage]), changes=changes)
        elif stage in freed:
            yield stage, replace(segment, blocks=(), operators=(), changes=tuple(freed[stage]))


def _stage_outside_blocks(change: MemoryChange, units: list[str], stage_of: _StageOf) -> int | None:
    """The stage of a tensor that was allocated outside of all equal blocks; None if a block allocated it. `units` are
    the blocks that stand for the others in the segments of the model."""
    if any(is_inside(change.layer, unit) for unit in units):
        return None
    return stage_of(change.layer)


def _neighbour_stage(segments: list[list[TraceSegment]], segment: TraceSegment, stages: int) -> int:
    """The stage where the previous segment of the same pass ended. In the forward pass it is the last stage that has
    segments so far, in the backward pass the first such stage."""
    same_pass = [stage for stage in range(stages) if any(s.phase == segment.phase for s in segments[stage])]
    if segment.phase == "forward":
        return max(same_pass, default=0)
    return min(same_pass, default=stages - 1)


def _operator_stages(layers: Iterable[str], stage_of: _StageOf, start: int) -> list[int]:
    """The stage of each operator, given the operators' layers. An operator whose layer has no stage belongs to the
    stage of the operator before it; the first such operators belong to the stage `start`."""
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
    """The number of tensors of a change on each stage, by stage. If every block of a segment allocated one of the
    tensors, each tensor is on the stage of its block. A tensor that was allocated between pieces is freed on the stage
    where it was allocated."""
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
    """The segment with only the operators at the positions `numbers` and only these changes, whose positions are
    adapted."""
    operators: tuple[Operator, ...] = tuple(segment.operators[number] for number in numbers)
    before = [bisect_left(numbers, change.after_operators) for change in changes]
    return replace(
        segment,
        operators=operators,
        changes=tuple(replace(change, after_operators=place) for change, place in zip(changes, before, strict=True)),
    )


def _parameter_stages(parameter: Parameter, stage_of: _StageOf) -> set[int]:
    """The stages of a parameter. A tied parameter is on every stage that uses it, a parameter outside of all pieces on
    the first stage."""
    stages = {stage_of(name.rpartition(".")[0]) for name in parameter.names}
    return {stage for stage in stages if stage is not None} or {0}

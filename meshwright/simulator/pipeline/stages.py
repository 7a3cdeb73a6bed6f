"""A model's profile, cut into those of its pipeline stages.

Every operator belongs to the piece of the model that ran it, every piece to a stage. What the forward pass computes
between pieces belongs to the piece before; what it computes ahead of them, to the first. A stage holds for each
microbatch what it received, beside what it saved itself.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from meshwright.blocks.module_names import within
from meshwright.errors import InputError, did_you_mean
from meshwright.profile.structure.cuts import Cut
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import Change, Growth, ModelProfile, Operator, Parameter, Stretch

_NOTHING = Growth(0.0, 0.0)


@dataclass(frozen=True)
class Stage:
    """`received` and `sent` are the values that cross the cuts before and behind it, in bytes of a microbatch."""

    profile: ModelProfile
    received: Growth
    sent: Growth


def stage_profiles(profile: ModelProfile, cuts: tuple[str, ...]) -> tuple[Stage, ...]:
    """The stages that the cuts (each a piece that ends one) make; one where there are none."""
    if not cuts:
        return (Stage(profile, _NOTHING, _NOTHING),)
    structure = profile.structure
    assert structure is not None
    found = [_find(structure, name) for name in cuts]
    home = _home(structure, cuts)
    crossing = [_crossing(cut) for cut in found]
    parts = _parts(profile, home, len(cuts) + 1)
    return tuple(
        Stage(part, received, sent)
        for part, received, sent in zip(parts, [_NOTHING, *crossing], [*crossing, _NOTHING], strict=True)
    )


def _find(structure: Structure, name: str) -> Cut:
    for cut in structure.cuts:
        if cut.after == name:
            return cut
    refused = next((no for no in structure.no_cuts if no.after == name), None)
    if refused is not None:
        raise InputError(f"the model cannot be cut after {name}: {refused.reason}")
    known = [cut.after for cut in structure.cuts]
    raise InputError(f"the model cannot be cut after {name}{did_you_mean(name, known)}")


def _crossing(cut: Cut) -> Growth:
    return Growth(float(sum(value.bytes_fixed for value in cut.crossing)), float(cut.bytes_per_sample))


def _home(structure: Structure, cuts: tuple[str, ...]) -> Callable[[str], int | None]:
    """The stage of a module; None for one that holds pieces of several, or none."""
    ends = set(cuts)
    stage, stages = 0, {}
    for piece in structure.pieces:
        stages[piece] = stage
        stage += piece in ends
    known: dict[str, int | None] = {}

    def home(module: str) -> int | None:
        if module not in known:
            known[module] = _lookup(stages, module)
        return known[module]

    return home


def _lookup(stages: dict[str, int], module: str) -> int | None:
    name = module
    while name:
        if name in stages:
            return stages[name]
        name = name.rpartition(".")[0]
    inside = {stage for piece, stage in stages.items() if module and piece.startswith(f"{module}.")}
    return min(inside) if len(inside) == 1 else None


def _parts(profile: ModelProfile, home: Callable[[str], int | None], stages: int) -> list[ModelProfile]:
    made: list[list[Stretch]] = [[] for _ in range(stages)]
    taken: dict[tuple[str, str, Growth], list[int]] = {}  # outside of the pieces, and not yet given back
    for stretch in profile.stretches:
        if stretch.blocks:
            foreign = {
                stage: [c for c in stretch.changes if _lives(c, profile, home) == stage] for stage in range(stages)
            }
            for stage in range(stages):
                blocks = tuple(block for block in stretch.blocks if (home(block) or 0) == stage)
                if blocks:
                    others = [c for at, changes in foreign.items() if at != stage for c in changes]
                    own = tuple(change for change in stretch.changes if change not in others)
                    made[stage].append(replace(stretch, blocks=blocks, changes=own))
                elif foreign[stage]:
                    made[stage].append(replace(stretch, blocks=(), operators=(), changes=tuple(foreign[stage])))
            continue
        start = _neighbour(made, stretch, stages)
        operators = _stages_of((o.layer for o in stretch.operators), home, start)
        placed = [_place(change, profile, operators, home, start, taken) for change in stretch.changes]
        for stage in range(stages):
            numbers = [number for number, at in enumerate(operators) if at == stage]
            changes = [
                replace(change, times=at[stage])
                for change, at in zip(stretch.changes, placed, strict=True)
                if stage in at
            ]
            if numbers or changes:
                made[stage].append(_restricted(stretch, numbers, changes))
    weights = [_parameter_stages(parameter, home) for parameter in profile.parameters]
    return [
        replace(
            profile,
            stretches=tuple(made[stage]),
            parameters=tuple(p for p, homes in zip(profile.parameters, weights, strict=True) if stage in homes),
            input_bytes=profile.input_bytes if stage in (0, stages - 1) else _NOTHING,
            buffer_bytes=profile.buffer_bytes // stages,
        )
        for stage in range(stages)
    ]


def _lives(change: Change, profile: ModelProfile, home: Callable[[str], int | None]) -> int | None:
    """The stage of what a block gives back though no block took it."""
    if any(stretch.blocks and within(change.layer, stretch.unit) for stretch in profile.stretches):
        return None
    return home(change.layer)


def _neighbour(made: list[list[Stretch]], stretch: Stretch, stages: int) -> int:
    """Where the stretch before this one ended: in forward the last stage that has any, in backward the first."""
    same = [stage for stage in range(stages) if any(s.phase == stretch.phase for s in made[stage])]
    if stretch.phase == "forward":
        return max(same, default=0)
    return min(same, default=stages - 1)


def _stages_of(layers: Iterable[str], home: Callable[[str], int | None], start: int) -> list[int]:
    found, here = [], start
    for layer in layers:
        at = home(layer)
        here = here if at is None else at
        found.append(here)
    return found


def _place(
    change: Change,
    profile: ModelProfile,
    operators: list[int],
    home: Callable[[str], int | None],
    start: int,
    taken: dict[tuple[str, str, Growth], list[int]],
) -> dict[int, int]:
    """How often a change happens on which stage: what all blocks of a stretch took goes where each of them is, and
    what was taken between pieces is given back where it was taken."""
    if change.times > 1:
        blocks = next(s.blocks for s in profile.stretches if s.blocks and within(change.layer, s.unit))
        return Counter(home(block) or 0 for block in blocks)
    at = home(change.layer)
    if at is None:
        size = change.bytes
        key = (change.role, change.layer, Growth(abs(size.constant), abs(size.linear), abs(size.square)))
        if (size.constant < 0 or size.linear < 0) and taken.get(key):
            return {taken[key].pop(0): 1}
        place = min(max(change.operator - 1, 0), len(operators) - 1)
        at = operators[place] if operators else start
        taken.setdefault(key, []).append(at)
    return {at: 1}


def _restricted(stretch: Stretch, numbers: list[int], changes: list[Change]) -> Stretch:
    kept: tuple[Operator, ...] = tuple(stretch.operators[number] for number in numbers)
    before = [bisect_left(numbers, change.operator) for change in changes]
    return replace(
        stretch,
        operators=kept,
        changes=tuple(replace(change, operator=place) for change, place in zip(changes, before, strict=True)),
    )


def _parameter_stages(parameter: Parameter, home: Callable[[str], int | None]) -> set[int]:
    """A tied weight lies on every stage that uses it; one outside of the pieces on the first."""
    homes = {home(name.rpartition(".")[0]) for name in parameter.names}
    return {stage for stage in homes if stage is not None} or {0}

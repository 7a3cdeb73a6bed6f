"""Which tensors cross each cut of a plan, and which weights each stage uses, call by call and leaf by leaf.

`Structure` says what crosses in words; here one forward pass on fake tensors is followed to find, for each of these
values, which leaf of which call it is. A value keeps its number through all stages, so one that hops over a stage is
recognised and handed on.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.profile.structure.cuts import Crossing, Cut
from meshwright.profile.structure.dataflow import record_flow
from meshwright.profile.structure.pieces import Pieces, find_pieces
from meshwright.profile.structure.structure import Structure

_BATCH = 2
Call = tuple[str, int]  # a piece's name, and which of its calls


@dataclass(frozen=True)
class Spot:
    """One tensor of what a call is given or returns: number `leaf` of its tensors."""

    call: Call
    leaf: int


@dataclass(frozen=True)
class Port:
    """A value that crosses a cut: it is returned at `made`, or where that is None only handed on, at `used`."""

    value: int
    made: Spot | None
    used: tuple[Spot, ...]


@dataclass(frozen=True)
class Wiring:
    """`stage_of` each call; of each cut the `ports`; of each stage the parameters it uses (`weights`, by their first
    names). `everywhere` are the pieces without weights that every stage runs: what they return depends on no weight or
    is what they were given, or they run in several stages. `passed`: what other calls return just as it was given
    (the leaf that is returned: the leaf that was given).
    `rewritten` are the buffers that the forward passes around the pieces write to; stages that `reuse` a weight have
    it in several operators."""

    stage_of: dict[Call, int]
    ports: tuple[tuple[Port, ...], ...]
    weights: tuple[frozenset[str], ...]
    everywhere: frozenset[str]
    rewritten: frozenset[str]
    reuse: frozenset[int]
    passed: dict[Call, dict[int, int]]

    @property
    def stages(self) -> int:
        return len(self.ports) + 1

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.stage_of))

    def stages_of(self, piece: str) -> set[int]:
        return {stage for (name, _), stage in self.stage_of.items() if name == piece}


def chosen_cuts(plan: Plan, structure: Structure) -> tuple[Cut, ...]:
    """The plan's cuts in the order of the stages. A name that stands twice means the second of its calls."""
    seen: Counter[str] = Counter()
    found = []
    for name in plan.pipeline.cuts:
        cuts = [cut for cut in structure.cuts if cut.after == name]
        if len(cuts) <= seen[name]:
            raise InputError(_no_cut(name, structure))
        found.append(cuts[seen[name]])
        seen[name] += 1
    places = [structure.cuts.index(cut) for cut in found]
    if places != sorted(places):
        right = ", ".join(structure.cuts[place].after for place in sorted(places))
        raise InputError(f"plan.pipeline.cuts do not stand in the order in which the model runs: that is {right}")
    for cut in found:
        if not cut.crossing:
            raise InputError(f"plan.pipeline.cuts: nothing before the cut behind {cut.after} is trained")
    return tuple(found)


def _no_cut(name: str, structure: Structure) -> str:
    known = list(dict.fromkeys(cut.after for cut in structure.cuts))
    begin = f"plan.pipeline.cuts: the model cannot be cut behind {name}"
    refused = next((found for found in structure.no_cuts if found.after == name), None)
    near = _nearest(name, structure)
    where = f"; the nearest cuts are behind {' and '.join(near)}" if near else ""
    if refused is not None:
        return f"{begin}: {refused.reason}{where}"
    if structure.pieces and name == structure.pieces[-1]:
        return f"{begin}: nothing runs behind it{where}"
    outer = next((piece for piece in structure.pieces if name.startswith(f"{piece}.")), None)
    if outer is not None:
        return f"{begin}: it lies inside {outer}, which is never taken apart{where}"
    if not known:
        return f"{begin}: {structure.reason}"
    return f"{begin}{did_you_mean(name, known)}"


def _nearest(name: str, structure: Structure) -> list[str]:
    place = next((p for p, piece in enumerate(structure.pieces) if name == piece or name.startswith(f"{piece}.")), None)
    if place is None:
        return []
    cuttable = {cut.after for cut in structure.cuts}
    before = [piece for piece in structure.pieces[:place] if piece in cuttable][-1:]
    behind = [piece for piece in structure.pieces[place:] if piece in cuttable and piece != name][:1]
    return before + behind


def find_wiring(model: nn.Module, plan: Plan, structure: Structure, sample: Any, target: str | None = None) -> Wiring:
    cuts = chosen_cuts(plan, structure)
    pieces = find_pieces(model, record_flow(model, sample, _BATCH, (), target, structure.evaluated))
    calls = _calls(pieces)
    ends = [calls.index((cut.after, cut.call)) for cut in cuts]
    stages = [sum(end < place for end in ends) for place in range(len(calls))]
    ports = tuple(tuple(_ports(pieces, calls, cut, end)) for cut, end in zip(cuts, ends, strict=True))
    weights = tuple(frozenset(_weights(pieces, stages, ports, stage)) for stage in range(len(cuts) + 1))
    flow = pieces.flow
    rewritten = {
        flow.values[value].name
        for number, op in enumerate(flow.ops)
        if pieces.of_op[number] < 0
        for value in op.mutated
        if flow.values[value].source == "buffer"
    }
    return Wiring(
        stage_of=dict(zip(calls, stages, strict=True)),
        ports=ports,
        weights=weights,
        everywhere=frozenset(_everywhere(model, pieces, stages)),
        rewritten=frozenset(rewritten),
        reuse=frozenset(stage for stage in range(len(cuts) + 1) if _reuses(pieces, stages, stage)),
        passed={call: found for place, call in enumerate(calls) if (found := _passed(pieces, place))},
    )


def _calls(pieces: Pieces) -> list[Call]:
    seen: Counter[str] = Counter()
    found = []
    for name in pieces.names:
        found.append((name, seen[name]))
        seen[name] += 1
    return found


def _everywhere(model: nn.Module, pieces: Pieces, stages: list[int]) -> Iterator[str]:
    homes: dict[str, set[int]] = {}
    needed: set[str] = set()  # where the others are left out, nothing is missing
    for place, name in enumerate(pieces.names):
        homes.setdefault(name, set()).add(stages[place])
        outputs = pieces.outputs[place].keys()
        if any(pieces.trained[root] for root in outputs) and outputs.isdisjoint(pieces.arguments[place]):
            needed.add(name)
    for name, home in homes.items():
        weightless = not any(True for _ in model.get_submodule(name).parameters())
        if weightless and (len(home) > 1 or name not in needed):
            yield name


def _passed(pieces: Pieces, place: int) -> dict[int, int]:
    call = pieces.flow.calls[pieces.calls[place]]
    return {leaf: call.inputs.index(number) for leaf, number in enumerate(call.outputs) if number in call.inputs}


# ---- ports


def _ports(pieces: Pieces, calls: list[Call], cut: Cut, end: int) -> Iterator[Port]:
    found: dict[int, Port] = {}
    for crossing in cut.crossing:
        before = len(found)
        if crossing.role == "output":
            maker = calls.index((crossing.module, crossing.call))
            for leaf, number in enumerate(pieces.flow.calls[pieces.calls[maker]].outputs):
                if _fits(pieces, number, crossing):
                    found.setdefault(number, Port(number, Spot(calls[maker], leaf), ()))
        else:
            for number, spots in _handed_on(pieces, calls, crossing, end):
                found.setdefault(number, Port(number, None, tuple(spots)))
        if len(found) == before and not any(_fits(pieces, number, crossing) for number in found):
            name = crossing.module or ", ".join(crossing.used_by)
            raise InputError(
                f"the sample batch is not like those that the cut behind {cut.after} was found with: {name}"
            )
    for number in sorted(found):
        yield found[number]


def _handed_on(pieces: Pieces, calls: list[Call], crossing: Crossing, end: int) -> Iterator[tuple[int, list[Spot]]]:
    """Values that the forward pass made before the cut, and that just the pieces in `used_by` are called with."""
    flow = pieces.flow
    time = flow.calls[pieces.calls[end + 1]].begin
    spots: dict[int, list[Spot]] = {}
    for place in range(end + 1, len(calls)):
        for leaf, number in enumerate(flow.calls[pieces.calls[place]].inputs):
            spots.setdefault(number, []).append(Spot(calls[place], leaf))
    for number, where in spots.items():
        root = flow.root(number)
        made = flow.values[root].op
        if made is None or made >= time or pieces.of_op[made] >= 0 or not pieces.trained[root]:
            continue
        users = [pieces.of_op[user] for user in pieces.users.get(root, ()) if user >= time]
        names = {pieces.names[user] for user in users if user >= 0}
        if names == set(crossing.used_by) and -1 not in users and _same_memory_fits(pieces, root, spots, crossing):
            yield number, where


def _same_memory_fits(pieces: Pieces, root: int, spots: dict[int, list[Spot]], crossing: Crossing) -> bool:
    """One view of it has the shape that crosses; pieces may be given others."""
    return any(pieces.flow.root(number) == root and _fits(pieces, number, crossing) for number in spots)


def _fits(pieces: Pieces, number: int, crossing: Crossing) -> bool:
    value = pieces.flow.values[number]
    return (
        value.shape == tuple(_size(word) for word in crossing.shape) and str(value.dtype) == f"torch.{crossing.dtype}"
    )


def _size(word: int | str) -> int:
    """`batch`, `2*batch`, `batch+3`: for the batch that was followed."""
    if isinstance(word, int):
        return word
    match = re.fullmatch(r"(?:(-?\d+)\*)?batch(?:\+(-?\d+))?", word)
    assert match is not None, word
    return int(match[1] or 1) * _BATCH + int(match[2] or 0)


# ---- weights


def _weights(pieces: Pieces, stages: list[int], ports: tuple[tuple[Port, ...], ...], stage: int) -> set[str]:
    """The parameters that a stage's pieces use, and those that the forward pass needs for what it gives to them."""
    flow = pieces.flow
    own = [place for place, home in enumerate(stages) if home == stage]
    todo: set[int] = set()
    for place in own:
        call = flow.calls[pieces.calls[place]]
        todo |= {flow.root(value) for value in call.inputs}
        todo |= {root for number in range(call.begin, call.end) for root in pieces.inputs_of_op[number]}
    if stage < len(ports):
        todo |= {flow.root(port.value) for port in ports[stage]}
    else:
        todo |= pieces.model_outputs
    received = {flow.root(port.value) for port in ports[stage - 1]} if stage else set()
    seen, left, weights = set(todo), list(todo), set()
    while left:
        root = left.pop()
        value = flow.values[root]
        if value.source == "parameter":
            weights.add(value.name)
        if value.op is None or root in received or pieces.of_op[value.op] >= 0:
            continue
        fresh = set(pieces.inputs_of_op[value.op]) - seen
        seen |= fresh
        left += fresh
    return weights


def _reuses(pieces: Pieces, stages: list[int], stage: int) -> bool:
    for root, users in pieces.users.items():
        if pieces.flow.values[root].source == "parameter":
            homes = [stages[piece] if (piece := pieces.of_op[user]) >= 0 else stage for user in users]
            if homes.count(stage) > 1:
                return True
    return False

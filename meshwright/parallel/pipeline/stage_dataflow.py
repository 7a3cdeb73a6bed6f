"""Which stage runs each module call, which tensors cross each cut of a plan, and which parameters each stage uses.

A piece is a module that is never cut: it runs as a whole in one stage. `Structure` describes what crosses a cut by
shapes and module names. Here one forward pass on fake tensors is recorded to find, for each of these tensors, the
position it has among the inputs or outputs of a piece's call. A tensor keeps its id through all stages, so a stage that
does not use a tensor recognises it and sends it on.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.profile.structure.cuts import Crossing, Cut
from meshwright.profile.structure.dataflow import record_dataflow
from meshwright.profile.structure.pieces import ModulePieces, find_pieces
from meshwright.profile.structure.structure import Structure

_BATCH = 2
CallKey = tuple[str, int]  # a piece's name, and the number of the call within one forward pass


@dataclass(frozen=True)
class TensorPosition:
    """The tensor number `tensor_index` among all tensors in the inputs, or in the outputs, of a call."""

    call: CallKey
    tensor_index: int


@dataclass(frozen=True)
class BoundaryTensor:
    """A tensor that crosses a cut. A piece returns it at `produced_at`; where that is None, the forward pass between
    the pieces computes it, and it is found at `consumed_at`, among the inputs of the pieces that use it."""

    value_id: int
    produced_at: TensorPosition | None
    consumed_at: tuple[TensorPosition, ...]


@dataclass(frozen=True)
class StageDataflow:
    """How the forward pass of a model is divided into stages.

    - `stage_of`: the stage that each call of a piece belongs to.
    - `boundaries`: for each cut, the tensors that cross it.
    - `parameters_by_stage`: for each stage, the parameters it uses, by their first names in the model.
    - `run_by_every_stage`: pieces without parameters that all stages run, because their results depend on no parameter
      or are one of their inputs, or because they are called in several stages.
    - `passed_through`: for calls that return an input unchanged, the output's tensor index and the input's.
    - `mutated_buffers`: buffers that the forward pass between the pieces writes to.
    - `stages_reusing_weights`: stages in which several operators use the same parameter.
    """

    stage_of: dict[CallKey, int]
    boundaries: tuple[tuple[BoundaryTensor, ...], ...]
    parameters_by_stage: tuple[frozenset[str], ...]
    run_by_every_stage: frozenset[str]
    mutated_buffers: frozenset[str]
    stages_reusing_weights: frozenset[int]
    passed_through: dict[CallKey, dict[int, int]]

    @property
    def pieces(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in self.stage_of))

    def stages_of(self, piece: str) -> set[int]:
        return {stage for (name, _), stage in self.stage_of.items() if name == piece}


def cuts_of_plan(plan: Plan, structure: Structure) -> tuple[Cut, ...]:
    """The plan's cuts in the order of the stages. If the plan lists a module several times, because the model calls it
    several times, the n-th entry is the n-th possible cut after it."""
    places: dict[str, list[int]] = {}
    for place, cut in enumerate(structure.cuts):
        places.setdefault(cut.after, []).append(place)
    times_listed: Counter[str] = Counter()
    order = []
    for name in plan.pipeline.cuts:
        if len(places.get(name, ())) <= times_listed[name]:
            raise InputError(_no_cut_message(name, structure))
        order.append(places[name][times_listed[name]])
        times_listed[name] += 1
    cuts = tuple(structure.cuts[place] for place in order)
    if order != sorted(order):
        right = ", ".join(structure.cuts[place].after for place in sorted(order))
        raise InputError(f"plan.pipeline.cuts are not in the order in which the model runs: write {right}")
    for cut in cuts:
        if not cut.crossing:
            raise InputError(
                f"plan.pipeline.cuts: nothing before the cut after {cut.after} is trained: choose a later cut"
            )
    return cuts


def _no_cut_message(name: str, structure: Structure) -> str:
    cuttable = list(dict.fromkeys(cut.after for cut in structure.cuts))
    begin = f"plan.pipeline.cuts: the model cannot be cut after {name}"
    refusal = next((no_cut for no_cut in structure.no_cuts if no_cut.after == name), None)
    nearest = _nearest_cuts(name, structure)
    hint = f"; the nearest cuts are after {' and '.join(nearest)}" if nearest else ""
    if refusal is not None:
        return f"{begin}: {refusal.reason}{hint}"
    if structure.pieces and name == structure.pieces[-1]:
        return f"{begin}: nothing runs after it{hint}"
    outer = next((piece for piece in structure.pieces if name.startswith(f"{piece}.")), None)
    if outer is not None:
        return f"{begin}: it lies inside {outer}, which is never taken apart{hint}"
    if not cuttable:
        return f"{begin}: {structure.no_cut_reason}"
    return f"{begin}{did_you_mean(name, cuttable)}"


def _nearest_cuts(name: str, structure: Structure) -> list[str]:
    """The last cut before the piece that `name` is or lies in, and the first one after it."""
    place = next((p for p, piece in enumerate(structure.pieces) if name == piece or name.startswith(f"{piece}.")), None)
    if place is None:
        return []
    cuttable = {cut.after for cut in structure.cuts}
    before = [piece for piece in structure.pieces[:place] if piece in cuttable][-1:]
    after = [piece for piece in structure.pieces[place:] if piece in cuttable and piece != name][:1]
    return before + after


def trace_stage_dataflow(
    model: nn.Module, plan: Plan, structure: Structure, sample: Any, target: str | None = None
) -> StageDataflow:
    cuts = cuts_of_plan(plan, structure)
    pieces = find_pieces(model, record_dataflow(model, sample, _BATCH, (), target, structure.found_in_evaluation))
    calls = _numbered_calls(pieces)
    last_calls = [calls.index((cut.after, cut.call)) for cut in cuts]  # of each stage but the last
    stages = [sum(last_call < place for last_call in last_calls) for place in range(len(calls))]
    boundaries = tuple(
        tuple(_boundary_tensors(pieces, calls, cut, last_call)) for cut, last_call in zip(cuts, last_calls, strict=True)
    )
    parameters = tuple(frozenset(_parameters_used(pieces, stages, boundaries, stage)) for stage in range(len(cuts) + 1))
    flow = pieces.flow
    mutated_buffers = {
        flow.values[value].name
        for number, op in enumerate(flow.operators)
        if pieces.piece_of_operator[number] < 0
        for value in op.overwritten
        if flow.values[value].source == "buffer"
    }
    return StageDataflow(
        stage_of=dict(zip(calls, stages, strict=True)),
        boundaries=boundaries,
        parameters_by_stage=parameters,
        run_by_every_stage=frozenset(_run_by_every_stage(model, pieces, stages)),
        mutated_buffers=frozenset(mutated_buffers),
        stages_reusing_weights=frozenset(
            stage for stage in range(len(cuts) + 1) if _reuses_a_weight(pieces, stages, stage)
        ),
        passed_through={
            call: outputs for place, call in enumerate(calls) if (outputs := _passed_through(pieces, place))
        },
    )


def _numbered_calls(pieces: ModulePieces) -> list[CallKey]:
    counts: Counter[str] = Counter()
    calls = []
    for name in pieces.names:
        calls.append((name, counts[name]))
        counts[name] += 1
    return calls


def _run_by_every_stage(model: nn.Module, pieces: ModulePieces, stages: list[int]) -> Iterator[str]:
    stages_of_piece: dict[str, set[int]] = {}
    result_depends_on_weights: set[str] = set()  # of earlier pieces, so that not every stage could compute the result
    for place, name in enumerate(pieces.names):
        stages_of_piece.setdefault(name, set()).add(stages[place])
        inputs, outputs = pieces.inputs_by_root[place], pieces.outputs_by_root[place].keys()
        if any(pieces.depends_on_weights[root] for root in outputs) and outputs.isdisjoint(inputs):
            result_depends_on_weights.add(name)
    for name, stages_with_calls in stages_of_piece.items():
        has_parameters = any(True for _ in model.get_submodule(name).parameters())
        if not has_parameters and (len(stages_with_calls) > 1 or name not in result_depends_on_weights):
            yield name


def _passed_through(pieces: ModulePieces, place: int) -> dict[int, int]:
    """The tensor indices of outputs that are inputs of the same call, with the indices of those inputs."""
    call = pieces.flow.calls[pieces.calls[place]]
    return {index: call.inputs.index(value) for index, value in enumerate(call.outputs) if value in call.inputs}


# ---- tensors that cross a cut


def _boundary_tensors(pieces: ModulePieces, calls: list[CallKey], cut: Cut, last_call: int) -> Iterator[BoundaryTensor]:
    tensors: dict[int, BoundaryTensor] = {}
    for crossing in cut.crossing:
        before = len(tensors)
        if crossing.role == "output":
            producer = calls.index((crossing.module, crossing.call))
            for index, value in enumerate(pieces.flow.calls[pieces.calls[producer]].outputs):
                if _matches(pieces, value, crossing):
                    position = TensorPosition(calls[producer], index)
                    tensors.setdefault(value, BoundaryTensor(value, position, ()))
        else:
            for value, positions in _computed_between_pieces(pieces, calls, crossing, last_call):
                tensors.setdefault(value, BoundaryTensor(value, None, tuple(positions)))
        if len(tensors) == before and not any(_matches(pieces, value, crossing) for value in tensors):
            name = crossing.module or ", ".join(crossing.used_by)
            raise InputError(
                f"the sample batch is not like the one that the cut after {cut.after} was found with, {name} has"
                " other shapes or types: use the same sample batch for the plan and for training"
            )
    for value in sorted(tensors):
        yield tensors[value]


def _computed_between_pieces(
    pieces: ModulePieces, calls: list[CallKey], crossing: Crossing, last_call: int
) -> Iterator[tuple[int, list[TensorPosition]]]:
    """Tensors that the forward pass computes outside of pieces before the cut, and that exactly the pieces in
    `used_by` are called with after it."""
    flow = pieces.flow
    cut_time = flow.calls[pieces.calls[last_call + 1]].begin
    positions: dict[int, list[TensorPosition]] = {}
    for place in range(last_call + 1, len(calls)):
        for index, value in enumerate(flow.calls[pieces.calls[place]].inputs):
            positions.setdefault(value, []).append(TensorPosition(calls[place], index))
    for value, value_positions in positions.items():
        root = flow.root(value)
        producer = flow.values[root].producer
        if (
            producer is None
            or producer >= cut_time
            or pieces.piece_of_operator[producer] >= 0
            or not pieces.depends_on_weights[root]
        ):
            continue
        users = [pieces.piece_of_operator[user] for user in pieces.users.get(root, ()) if user >= cut_time]
        names = {pieces.names[user] for user in users if user >= 0}
        if names == set(crossing.used_by) and -1 not in users and _a_view_matches(pieces, root, positions, crossing):
            yield value, value_positions


def _a_view_matches(
    pieces: ModulePieces, root: int, positions: dict[int, list[TensorPosition]], crossing: Crossing
) -> bool:
    """Whether some view of this memory has the shape that crosses; pieces may get other views of it."""
    return any(pieces.flow.root(value) == root and _matches(pieces, value, crossing) for value in positions)


def _matches(pieces: ModulePieces, value_id: int, crossing: Crossing) -> bool:
    value = pieces.flow.values[value_id]
    shape = tuple(size if isinstance(size, int) else size.at(_BATCH) for size in crossing.shape)
    return value.shape == shape and str(value.dtype) == f"torch.{crossing.dtype}"


# ---- parameters


def _parameters_used(
    pieces: ModulePieces, stages: list[int], boundaries: tuple[tuple[BoundaryTensor, ...], ...], stage: int
) -> set[str]:
    """Names of the parameters that a stage's pieces use, and of those that the forward pass between the pieces uses
    for their inputs and for what the stage sends."""
    flow = pieces.flow
    needed: set[int] = set()
    for place, stage_of_call in enumerate(stages):
        if stage_of_call == stage:
            call = flow.calls[pieces.calls[place]]
            needed |= {flow.root(value) for value in call.inputs}
            needed |= {root for number in range(call.begin, call.end) for root in pieces.operator_inputs[number]}
    if stage < len(boundaries):
        needed |= {flow.root(tensor.value_id) for tensor in boundaries[stage]}
    else:
        needed |= pieces.model_outputs
    received = {flow.root(tensor.value_id) for tensor in boundaries[stage - 1]} if stage else set()
    seen, pending, parameters = set(needed), list(needed), set()
    while pending:
        root = pending.pop()
        value = flow.values[root]
        if value.source == "parameter":
            parameters.add(value.name)
        if value.producer is None or root in received or pieces.piece_of_operator[value.producer] >= 0:
            continue
        unseen = set(pieces.operator_inputs[value.producer]) - seen
        seen |= unseen
        pending += unseen
    return parameters


def _reuses_a_weight(pieces: ModulePieces, stages: list[int], stage: int) -> bool:
    """Whether several operators of a stage use one parameter. An operator outside of pieces counts for every stage."""
    for root, users in pieces.users.items():
        if pieces.flow.values[root].source == "parameter":
            stages_of_users = [
                stages[piece] if (piece := pieces.piece_of_operator[user]) >= 0 else stage for user in users
            ]
            if stages_of_users.count(stage) > 1:
                return True
    return False

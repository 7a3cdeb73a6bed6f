"""Where a model can be cut into pipeline stages that run its original modules, and which values cross each cut.

A stage runs the original forward functions of the model, with the modules of other stages replaced. A replaced module
returns the tensors that were received for it, or a meaningless value if none were (a module that returns its argument
unchanged still does so). Therefore a cut lies between two consecutive pieces (`pieces.py`), and every value that is
produced before the cut and used after it must be one of:

- a value that a piece returned, skip connections included: it is received as the output of that piece;
- a value that code between the pieces computed from such values and only passes to later pieces: it is received as
  their argument;
- a value that depends on no weight (positions, masks): each stage computes it again from the model's inputs.

If code between the pieces computes further with one of its own values, each stage computes that value again from the
outputs of the pieces. There is no cut where a module passes on a value that it does not return, where a module with
weights runs on both sides or computes a value that depends on none, where a received value would be overwritten in
place, where both sides would need the same random numbers, or where the forward pass differentiates what it has
computed on the other side (`CutProblem`).
"""

from dataclasses import dataclass
from typing import Literal

from meshwright.dtypes import torch_name
from meshwright.profile.structure.dataflow import Dataflow
from meshwright.profile.structure.pieces import ModulePieces, is_random


@dataclass(frozen=True)
class BatchDimension:
    """A size of a tensor that grows with the batch: per_sample · batch + fixed."""

    per_sample: int
    fixed: int = 0

    def at(self, batch: int) -> int:
        """The size for a batch of this many samples."""
        return self.per_sample * batch + self.fixed

    def __str__(self) -> str:
        """`batch`, `2*batch` or `batch+3`."""
        product = "batch" if self.per_sample == 1 else f"{self.per_sample}*batch"
        return f"{product}+{self.fixed}" if self.fixed else product


@dataclass(frozen=True)
class Crossing:
    """A value that is sent over a cut, with bytes_per_sample · batch + bytes_fixed bytes.

    `role` says how the receiving stage uses the value: as the output of the replaced module `module`, or as an argument
    of the modules in `used_by` (then `module` is empty). `used_by` are the pieces after the cut that use the value.
    """

    module: str
    role: Literal["output", "argument"]
    used_by: tuple[str, ...]
    shape: tuple[int | BatchDimension, ...]
    dtype: str
    bytes_per_sample: int
    bytes_fixed: int = 0
    call: int = 0  # which of the module's calls returned the value, counted from 0


@dataclass(frozen=True)
class Cut:
    """A possible cut between the consecutive pieces `after` and `before`. `crossing` are the values that are sent over
    the cut, `inputs` the names of the model's inputs that are used after it, and `shared` the parameters that are used
    on both sides. If the module `after` runs more than once, `call` says which of its calls the cut follows, counted
    from 0."""

    after: str
    before: str
    crossing: tuple[Crossing, ...]
    inputs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    call: int = 0

    @property
    def bytes_per_sample(self) -> int:
        """Bytes that are sent over the cut per sample of the batch."""
        return sum(value.bytes_per_sample for value in self.crossing)


CutProblem = Literal[
    "hidden_value",
    "value_without_weights",
    "same_random_numbers",
    "overwritten_input",
    "runs_on_both_sides",
    "differentiated",
]
_PROBLEMS: dict[CutProblem, str] = {
    "hidden_value": "{module} passes on a value that it does not return",
    "value_without_weights": "{module} computes a value that depends on no weight and that is used behind the cut",
    "same_random_numbers": "the forward pass draws random numbers that both sides use",
    "overwritten_input": "{module} overwrites its input in place",
    "runs_on_both_sides": "{module} runs on both sides",
    "differentiated": "the forward pass takes derivatives (torch.autograd.grad) through both sides",
}


@dataclass(frozen=True)
class NoCut:
    """Why the model cannot be cut between the consecutive pieces `after` and `before`: a problem, and the module that
    causes it (empty if no module does)."""

    after: str
    before: str
    problem: CutProblem
    module: str = ""

    @property
    def reason(self) -> str:
        """The problem as a phrase for users."""
        return _PROBLEMS[self.problem].format(module=self.module)


class _CannotCut(Exception):
    def __init__(self, problem: CutProblem, module: str = "") -> None:
        super().__init__(problem, module)
        self.problem: CutProblem = problem
        self.module = module


def find_cuts(
    pieces: ModulePieces, larger: Dataflow, sizes: tuple[int, int]
) -> tuple[tuple[Cut, ...], tuple[NoCut, ...]]:
    """Returns, for every two consecutive pieces, either the cut between them (first result) or the reason why there is
    none (second result). `pieces` are those of the dataflow for the batch size `sizes[0]`, and `larger` is the dataflow
    for `sizes[1]`."""
    cuts: list[Cut] = []
    no_cuts: list[NoCut] = []
    for piece in range(len(pieces.calls) - 1):
        after, before = pieces.names[piece : piece + 2]
        try:
            cuts.append(_cut(pieces, larger, sizes, piece))
        except _CannotCut as error:
            no_cuts.append(NoCut(after, before, error.problem, error.module))
    return tuple(cuts), tuple(no_cuts)


def _cut(pieces: ModulePieces, larger: Dataflow, sizes: tuple[int, int], piece: int) -> Cut:
    """Returns the cut after a piece, or raises `_CannotCut`. In this file, `boundary` is the number of the first
    operator after the cut."""
    boundary = pieces.flow.calls[pieces.calls[piece + 1]].begin
    _check_runs_on_one_side(pieces, piece)
    _check_not_differentiated(pieces, boundary)
    needed = _needed_after_cut(pieces, piece, boundary)
    _check_not_overwritten(pieces, needed.received, boundary)
    crossing = tuple(
        _crossing(pieces, larger, sizes, boundary, root, needed.received[root]) for root in sorted(needed.received)
    )
    used_again = {name for name in needed.weights if _is_used_before(pieces, name, boundary)}
    shared = tuple(sorted(_used_on_both_sides(pieces, boundary) | used_again))
    after, before = pieces.names[piece : piece + 2]
    return Cut(after, before, crossing, tuple(sorted(needed.inputs)), shared, call=pieces.names[:piece].count(after))


@dataclass(frozen=True)
class _Received:
    """A value that is sent over a cut: the number of the piece that returned it, or None for an argument of a later
    piece; and the number of the value."""

    piece: int | None
    value: int


@dataclass(frozen=True)
class _NeededAfterCut:
    """The data that stages after a cut need: values that are sent over the cut, by their root (`Dataflow.root`); names
    of the model's inputs; and names of weights that code between the pieces uses."""

    received: dict[int, _Received]
    inputs: set[str]
    weights: set[str]


def _needed_after_cut(pieces: ModulePieces, piece: int, boundary: int) -> _NeededAfterCut:
    flow = pieces.flow
    received: dict[int, _Received] = {}
    inputs: set[str] = set()
    weights: set[str] = set()
    todo = []
    for root in _live_values(pieces, boundary):
        if _is_only_argument(pieces, root, piece, boundary):
            users = _users_after(pieces, root, boundary)
            received[root] = _Received(None, next(pieces.inputs_by_root[user][root] for user in users))
        else:
            todo.append(root)
    seen = set(todo)
    while todo:  # from values that code between pieces needs, back to values that are received or come from inputs
        root = todo.pop()
        value = flow.values[root]
        received.pop(root, None)  # a value that is computed again need not be received as an argument
        if value.source == "parameter":
            weights.add(value.name)
        elif not pieces.depends_on_weights[root]:
            _check_every_stage_computes(pieces, root)
            inputs |= pieces.model_inputs[root]
        elif (output := _returned_value(pieces, root, piece)) is not None:
            received[root] = output
        else:
            assert value.producer is not None
            producing_piece = pieces.piece_of_operator[value.producer]
            if producing_piece >= 0:
                raise _CannotCut("hidden_value", pieces.names[producing_piece])
            if is_random(flow.operators[value.producer]):
                raise _CannotCut("same_random_numbers")
            if flow.operators[value.producer].in_backward:
                raise _CannotCut("differentiated")
            unseen = [v for v in pieces.operator_inputs[value.producer] if v not in seen]
            seen.update(unseen)
            todo += unseen
    return _NeededAfterCut(received, inputs, weights)


def _check_every_stage_computes(pieces: ModulePieces, root: int) -> None:
    """Raises `_CannotCut` if a piece that has weights, and so runs in one stage only, takes part in computing a value
    that depends on no weight. Such values are not sent: every stage computes them itself."""
    todo, seen = [root], {root}
    while todo:
        producer = pieces.flow.values[todo.pop()].producer
        if producer is None:
            continue
        piece = pieces.piece_of_operator[producer]
        if piece >= 0 and pieces.holds_parameters[piece]:
            raise _CannotCut("value_without_weights", pieces.names[piece])
        unseen = [value for value in pieces.operator_inputs[producer] if value not in seen]
        seen.update(unseen)
        todo += unseen


def _live_values(pieces: ModulePieces, boundary: int) -> list[int]:
    """The roots of values other than parameters that exist before the boundary and are used after it."""
    live = []
    for root in {*pieces.users, *pieces.model_outputs}:
        value = pieces.flow.values[root]
        users = pieces.users.get(root, [])
        is_used_after = root in pieces.model_outputs or (users and users[-1] >= boundary)
        if is_used_after and value.source != "parameter" and (value.producer is None or value.producer < boundary):
            live.append(root)
    return live


def _returned_value(pieces: ModulePieces, root: int, piece: int) -> _Received | None:
    """The value as the earliest piece before the cut returned it, or None if no piece returned it. `piece` is the last
    piece before the cut."""
    for earlier in range(piece + 1):
        if root in pieces.outputs_by_root[earlier]:
            return _Received(earlier, pieces.outputs_by_root[earlier][root])
    return None


def _users_after(pieces: ModulePieces, root: int, boundary: int) -> list[int]:
    """The numbers of the pieces after the boundary that use a value. The number -1 stands for code between pieces."""
    users = [user for user in pieces.users.get(root, ()) if user >= boundary]
    return list(dict.fromkeys(pieces.piece_of_operator[user] for user in users))


def _is_only_argument(pieces: ModulePieces, root: int, piece: int, boundary: int) -> bool:
    """Whether code between the pieces computed the value, and everything after the cut that uses it is a piece that
    receives it as an argument."""
    producer = pieces.flow.values[root].producer
    if (
        producer is None
        or pieces.piece_of_operator[producer] >= 0
        or not pieces.depends_on_weights[root]
        or root in pieces.model_outputs
    ):
        return False
    users = _users_after(pieces, root, boundary)
    is_passed = all(user >= 0 and root in pieces.inputs_by_root[user] for user in users)
    return is_passed and _returned_value(pieces, root, piece) is None


def _crossing(
    pieces: ModulePieces, larger: Dataflow, sizes: tuple[int, int], boundary: int, root: int, received: _Received
) -> Crossing:
    small = pieces.flow.values[received.value]
    large = larger.values[_in_larger(received.value, pieces.flow, larger)]
    bytes_per_sample = (large.bytes - small.bytes) // (sizes[1] - sizes[0])
    users = [pieces.names[user] for user in _users_after(pieces, root, boundary) if user >= 0]
    piece = received.piece
    return Crossing(
        module=pieces.names[piece] if piece is not None else "",
        call=pieces.names[:piece].count(pieces.names[piece]) if piece is not None else 0,
        role="output" if piece is not None else "argument",
        used_by=tuple(dict.fromkeys(users)),
        shape=tuple(_fit_size(a, b, sizes) for a, b in zip(small.shape, large.shape, strict=True)),
        dtype=torch_name(small.dtype),
        bytes_per_sample=bytes_per_sample,
        bytes_fixed=small.bytes - bytes_per_sample * sizes[0],
    )


def _in_larger(value: int, flow: Dataflow, larger: Dataflow) -> int:
    """The number of the same value in the dataflow of the larger batch, which has the same operators. Its numbers
    differ where an operator returns one tensor for each sample."""
    producer = flow.values[value].producer
    if producer is None:
        return value
    ours, theirs = flow.operators[producer], larger.operators[producer]
    if value in ours.outputs:
        return theirs.outputs[ours.outputs.index(value)]
    return theirs.replacements[ours.replacements.index(value)]


def _fit_size(small: int, large: int, batches: tuple[int, int]) -> int | BatchDimension:
    """A size of a tensor as a function of the batch size, given the sizes `small` and `large` at the two batch
    sizes."""
    if small == large:
        return small
    per_sample = (large - small) // (batches[1] - batches[0])
    return BatchDimension(per_sample, small - per_sample * batches[0])


# ---- what forbids a cut, and which parameters both sides use


def _check_runs_on_one_side(pieces: ModulePieces, piece: int) -> None:
    later = range(piece + 1, len(pieces.calls))
    later_names = {pieces.names[other] for other in later if pieces.holds_parameters[other]}
    for name in pieces.names[: piece + 1]:
        if name in later_names:
            raise _CannotCut("runs_on_both_sides", name)


def _check_not_differentiated(pieces: ModulePieces, boundary: int) -> None:
    """Raises `_CannotCut` if code between the pieces differentiates after the boundary. What it differentiates was
    partly computed before the boundary."""
    if pieces.last_derivative >= boundary:
        raise _CannotCut("differentiated")


def _check_not_overwritten(pieces: ModulePieces, received: dict[int, _Received], boundary: int) -> None:
    flow = pieces.flow
    for root in received:
        for user in pieces.users.get(root, ()):
            if user >= boundary and root in {flow.root(v) for v in flow.operators[user].overwritten}:
                raise _CannotCut("overwritten_input", flow.calls[flow.operators[user].call].module)


def _used_on_both_sides(pieces: ModulePieces, boundary: int) -> set[str]:
    """The names of the parameters that operators both before and after the boundary use."""
    return {
        pieces.flow.values[root].name
        for root, users in pieces.users.items()
        if pieces.flow.values[root].source == "parameter" and users[0] < boundary <= users[-1]
    }


def _is_used_before(pieces: ModulePieces, parameter: str, boundary: int) -> bool:
    return any(
        users[0] < boundary
        for root, users in pieces.users.items()
        if pieces.flow.values[root].source == "parameter" and pieces.flow.values[root].name == parameter
    )

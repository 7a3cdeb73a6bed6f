"""Where a model can be cut into pipeline stages that run its original modules, and which values cross each cut.

A stage runs the original forward passes with the modules of other stages left out: one left out returns what was
received for it, or nothing of interest (one that only hands on its argument still does so). So a cut lies between
two pieces, and every value that is made before it and used behind it must be one of:

- what a piece returned (skip connections included): it is received as that piece's output;
- what the forward pass around the pieces made of such values and only hands to later pieces: received as argument;
- what depends on no weight: each stage computes it again from the model's inputs (positions, masks).

What the forward pass itself goes on computing with is computed again from the pieces' outputs. There is no cut where
a module hands on values behind the forward pass's back, where a module with weights runs on both sides, where a
received value would be overwritten in place, or where chance would have to fall twice the same way.
"""

from dataclasses import dataclass
from typing import Literal

from meshwright.profile.structure.dataflow import Flow
from meshwright.profile.structure.pieces import Pieces, is_random


@dataclass(frozen=True)
class Crossing:
    """A value sent from before to behind a cut. Of `shape`, the word `batch` (or `2*batch`, ...) grows with the batch.

    `role` says how it is received: in place of the `module`'s output, or as argument of the modules in `used_by`.
    """

    module: str
    role: Literal["output", "argument"]
    used_by: tuple[str, ...]
    shape: tuple[int | str, ...]
    dtype: str
    bytes_per_sample: int
    bytes_fixed: int = 0
    call: int = 0  # which of the module's calls, where it runs more than once


@dataclass(frozen=True)
class Cut:
    """Between two pieces. `inputs` are the model's inputs that are used behind it, `shared` the parameters that are
    used on both sides. `call` says which call of the module `after`, where it runs more than once."""

    after: str
    before: str
    crossing: tuple[Crossing, ...]
    inputs: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    call: int = 0

    @property
    def bytes_per_sample(self) -> int:
        return sum(value.bytes_per_sample for value in self.crossing)


@dataclass(frozen=True)
class NoCut:
    after: str
    before: str
    reason: str


class _Forbidden(Exception):
    pass


def find_cuts(pieces: Pieces, larger: Flow, sizes: tuple[int, int]) -> tuple[tuple[Cut, ...], tuple[NoCut, ...]]:
    """`larger` is the same flow for the second of the two batch sizes."""
    cuts: list[Cut] = []
    refused: list[NoCut] = []
    for piece in range(len(pieces.calls) - 1):
        after, before = pieces.names[piece : piece + 2]
        try:
            cuts.append(_cut(pieces, larger, sizes, piece))
        except _Forbidden as reason:
            refused.append(NoCut(after, before, str(reason)))
    return tuple(cuts), tuple(refused)


def _cut(pieces: Pieces, larger: Flow, sizes: tuple[int, int], piece: int) -> Cut:
    flow = pieces.flow
    time = flow.calls[pieces.calls[piece + 1]].begin
    _check_repeats(pieces, piece)
    sent: dict[int, tuple[int, int]] = {}  # by memory: the piece that returned it (-1: none), and the value
    inputs: set[str] = set()
    weights: set[str] = set()  # that the forward pass itself uses again
    todo = []
    for root in _live(pieces, time):
        if _is_argument(pieces, root, piece, time):
            sent[root] = (-1, next(pieces.arguments[p][root] for p in _using(pieces, root, time)))
        else:
            todo.append(root)
    seen = set(todo)
    while todo:  # what the forward pass itself needs, back to what it can have
        root = todo.pop()
        value = flow.values[root]
        sent.pop(root, None)  # where it is computed again, it need not be received as argument
        if value.source == "parameter":
            weights.add(value.name)
        elif not pieces.trained[root]:
            inputs |= pieces.model_inputs[root]
        elif (found := _returned(pieces, root, piece)) is not None:
            sent[root] = found
        else:
            assert value.op is not None
            maker = pieces.of_op[value.op]
            if maker >= 0:
                raise _Forbidden(f"{pieces.names[maker]} hands on a value that it does not return")
            if is_random(flow.ops[value.op]):
                raise _Forbidden("the forward pass draws random numbers that both sides use")
            fresh = [v for v in pieces.inputs_of_op[value.op] if v not in seen]
            seen.update(fresh)
            todo += fresh
    for root in sent:
        for user in pieces.users.get(root, ()):
            if user >= time and root in {flow.root(v) for v in flow.ops[user].mutated}:
                raise _Forbidden(f"{flow.calls[flow.ops[user].call].module} overwrites its input in place")
    crossing = tuple(_crossing(pieces, larger, sizes, time, root, sent[root]) for root in sorted(sent))
    shared = tuple(
        sorted(_on_both_sides(pieces, time) | {name for name in weights if _used_before(pieces, name, time)})
    )
    after, before = pieces.names[piece : piece + 2]
    return Cut(after, before, crossing, tuple(sorted(inputs)), shared, call=pieces.names[:piece].count(after))


def _live(pieces: Pieces, time: int) -> list[int]:
    """Values made before `time` that are used from then on. Parameters are not sent."""
    found = []
    for root in {*pieces.users, *pieces.model_outputs}:
        value = pieces.flow.values[root]
        users = pieces.users.get(root, [])
        late = root in pieces.model_outputs or (users and users[-1] >= time)
        if late and value.source != "parameter" and (value.op is None or value.op < time):
            found.append(root)
    return found


def _returned(pieces: Pieces, root: int, piece: int) -> tuple[int, int] | None:
    """The earliest piece that returned the value, and the value as returned."""
    for earlier in range(piece + 1):
        if root in pieces.outputs[earlier]:
            return earlier, pieces.outputs[earlier][root]
    return None


def _using(pieces: Pieces, root: int, time: int) -> list[int]:
    """The pieces behind the cut that use a value; -1 stands for a forward pass around them."""
    return list(dict.fromkeys(pieces.of_op[user] for user in pieces.users.get(root, ()) if user >= time))


def _is_argument(pieces: Pieces, root: int, piece: int, time: int) -> bool:
    """Whether the forward pass around the pieces made it, and only hands it to pieces."""
    made = pieces.flow.values[root].op
    if made is None or pieces.of_op[made] >= 0 or not pieces.trained[root] or root in pieces.model_outputs:
        return False
    users = _using(pieces, root, time)
    passed = all(p >= 0 and root in pieces.arguments[p] for p in users)
    return passed and _returned(pieces, root, piece) is None


def _crossing(
    pieces: Pieces, larger: Flow, sizes: tuple[int, int], time: int, root: int, found: tuple[int, int]
) -> Crossing:
    maker, number = found
    small, large = pieces.flow.values[number], larger.values[number]
    a, b = sizes
    grown = (large.bytes - small.bytes) // (b - a)
    users = [pieces.names[p] for p in _using(pieces, root, time) if p >= 0]
    return Crossing(
        module=pieces.names[maker] if maker >= 0 else "",
        call=pieces.names[:maker].count(pieces.names[maker]) if maker >= 0 else 0,
        role="output" if maker >= 0 else "argument",
        used_by=tuple(dict.fromkeys(users)),
        shape=tuple(_size(x, y, a, b) for x, y in zip(small.shape, large.shape, strict=True)),
        dtype=str(small.dtype).removeprefix("torch."),
        bytes_per_sample=grown,
        bytes_fixed=small.bytes - grown * a,
    )


def _size(small: int, large: int, a: int, b: int) -> int | str:
    if small == large:
        return small
    factor, rest = divmod(large - small, b - a)
    fixed = small - factor * a
    word = "batch" if factor == 1 else f"{factor}*batch"
    return word if not fixed and not rest else f"{word}+{fixed}"


def _check_repeats(pieces: Pieces, piece: int) -> None:
    later = range(piece + 1, len(pieces.calls))
    behind = {pieces.names[other] for other in later if pieces.holds_parameters[other]}
    for name in pieces.names[: piece + 1]:
        if name in behind:
            raise _Forbidden(f"{name} runs on both sides")


def _on_both_sides(pieces: Pieces, time: int) -> set[str]:
    return {
        pieces.flow.values[root].name
        for root, users in pieces.users.items()
        if pieces.flow.values[root].source == "parameter" and users[0] < time <= users[-1]
    }


def _used_before(pieces: Pieces, name: str, time: int) -> bool:
    return any(
        users[0] < time
        for root, users in pieces.users.items()
        if pieces.flow.values[root].source == "parameter" and pieces.flow.values[root].name == name
    )

"""Which parts of a model do not need each other: towers that read inputs of their own, and heads on a common trunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.profile.structure.pieces import Pieces


@dataclass(frozen=True)
class Branch:
    """`inputs` are the model's inputs that it reads itself, `consumes` the modules outside whose results it uses."""

    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    consumes: tuple[str, ...]


@dataclass(frozen=True)
class Branches:
    """Towers meet in, heads begin behind the module `join`; empty: in the model's own forward pass or in the loss."""

    kind: Literal["towers", "heads"]
    branches: tuple[Branch, ...]
    join: str


def find_branches(pieces: Pieces) -> tuple[Branches, ...]:
    return tuple(found for found in (_towers(pieces), _heads(pieces)) if found is not None)


def _towers(pieces: Pieces) -> Branches | None:
    """What runs before the first module that needs two parts which did not need each other."""
    groups, join = _grown(range(len(pieces.calls)), pieces.needs, pieces.holds_parameters)
    branches = [branch for branch in (_branch(pieces, group) for group in groups) if branch.inputs]
    names = [name for branch in branches for name in branch.inputs]
    if len(branches) < 2 or len(names) != len(set(names)):
        return None
    return Branches("towers", tuple(branches), pieces.names[join] if join is not None else "")


def _heads(pieces: Pieces) -> Branches | None:
    """The same from the end: what runs behind the last module that two such parts need."""
    order = range(len(pieces.calls) - 1, -1, -1)
    needed_by: list[set[int]] = [set() for _ in pieces.calls]
    for piece, needs in enumerate(pieces.needs):
        for need in needs:
            needed_by[need].add(piece)
    groups, join = _grown(order, needed_by, pieces.holds_parameters)
    if join is None or len(groups) < 2:
        return None
    branches = [_branch(pieces, group) for group in sorted(groups, key=min)]
    return Branches("heads", tuple(branches), pieces.names[join])


def _grown(
    order: Iterable[int], edges: Sequence[set[int]], weighs: Sequence[bool]
) -> tuple[list[set[int]], int | None]:
    """Parts with weights that have no edge between them, grown in order until a piece would join two of them."""
    groups: list[set[int]] = []
    for piece in order:
        touched = [group for group in groups if group & edges[piece]]
        if sum(any(weighs[p] for p in group) for group in touched) > 1:
            return [group for group in groups if any(weighs[p] for p in group)], piece
        groups = [group for group in groups if group not in touched]
        groups.append(set().union({piece}, *touched))
    return [group for group in groups if any(weighs[p] for p in group)], None


def _branch(pieces: Pieces, group: set[int]) -> Branch:
    flow = pieces.flow
    inputs: set[str] = set()
    for number, piece in enumerate(pieces.of_op):
        if piece in group:
            for value in pieces.inputs_of_op[number]:
                if not pieces.trained[value]:
                    inputs |= pieces.model_inputs[value]
    consumes = sorted({need for piece in group for need in pieces.needs[piece]} - group)
    names = tuple(dict.fromkeys(flow.calls[pieces.calls[piece]].module for piece in sorted(group)))
    return Branch(names, tuple(sorted(inputs)), tuple(pieces.names[piece] for piece in consumes))


def collapsed(names: Sequence[str], all_names: Iterable[str]) -> tuple[str, ...]:
    """The outermost modules that hold these pieces and no others."""
    inside = set(names)
    others = [name for name in all_names if name not in inside]
    found: dict[str, None] = {}
    for name in names:
        while (parent := name.rpartition(".")[0]) and not any(other.startswith(f"{parent}.") for other in others):
            name = parent
        found[name] = None
    return tuple(found)

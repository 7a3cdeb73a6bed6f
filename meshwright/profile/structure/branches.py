"""Finds branches of a model: groups of modules that do not depend on each other and can therefore run on different
ranks. Branches are towers, which read different inputs, or heads on a common trunk."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from meshwright.profile.structure.pieces import ModulePieces


@dataclass(frozen=True)
class Branch:
    """One branch of a model. `inputs` are the names of the model's inputs that its modules read directly, `consumes`
    the modules outside of the branch whose results it uses."""

    modules: tuple[str, ...]
    inputs: tuple[str, ...]
    consumes: tuple[str, ...]


@dataclass(frozen=True)
class Branches:
    """Branches that do not depend on each other. For towers, `join` is the first module that depends on two of them; it
    is empty if the towers meet in the model's own forward function or in the loss. For heads, `join` is the last module
    that two of them depend on."""

    kind: Literal["towers", "heads"]
    branches: tuple[Branch, ...]
    join: str


def find_branches(pieces: ModulePieces) -> tuple[Branches, ...]:
    """Returns the towers and the heads of a model: one `Branches` for each of the two kinds that the model has, or an
    empty tuple."""
    return tuple(branches for branches in (_towers(pieces), _heads(pieces)) if branches is not None)


def _towers(pieces: ModulePieces) -> Branches | None:
    """The independent groups of pieces before the first piece that depends on two of them, without groups that read no
    input of the model. None if fewer than two groups remain, or if two of them read the same input."""
    groups, join = _independent_groups(range(len(pieces.calls)), pieces.dependencies, pieces.holds_parameters)
    branches = [branch for branch in (_branch(pieces, group) for group in groups) if branch.inputs]
    names = [name for branch in branches for name in branch.inputs]
    if len(branches) < 2 or len(names) != len(set(names)):
        return None
    return Branches("towers", tuple(branches), pieces.names[join] if join is not None else "")


def _heads(pieces: ModulePieces) -> Branches | None:
    """The independent groups of pieces behind the last piece that two of them depend on. None if there is no such
    piece."""
    order = range(len(pieces.calls) - 1, -1, -1)
    dependents: list[set[int]] = [set() for _ in pieces.calls]
    for piece, dependencies in enumerate(pieces.dependencies):
        for dependency in dependencies:
            dependents[dependency].add(piece)
    groups, join = _independent_groups(order, dependents, pieces.holds_parameters)
    if join is None or len(groups) < 2:
        return None
    branches = [_branch(pieces, group) for group in sorted(groups, key=min)]
    return Branches("heads", tuple(branches), pieces.names[join])


def _independent_groups(
    order: Iterable[int], edges: Sequence[set[int]], holds_parameters: Sequence[bool]
) -> tuple[list[set[int]], int | None]:
    """Returns groups of pieces that have parameters and no edge between them, and the piece that would join two groups.
    Pieces are added to the groups in the given order until there is such a piece; it is None if there is none."""

    def has_parameters(group: set[int]) -> bool:
        return any(holds_parameters[piece] for piece in group)

    groups: list[set[int]] = []
    for piece in order:
        touched = [group for group in groups if group & edges[piece]]
        if sum(map(has_parameters, touched)) > 1:
            return [group for group in groups if has_parameters(group)], piece
        groups = [group for group in groups if group not in touched]
        groups.append(set().union({piece}, *touched))
    return [group for group in groups if has_parameters(group)], None


def _branch(pieces: ModulePieces, group: set[int]) -> Branch:
    flow = pieces.flow
    inputs: set[str] = set()
    for number, piece in enumerate(pieces.piece_of_operator):
        if piece in group:
            for value in pieces.operator_inputs[number]:
                if not pieces.depends_on_weights[value]:
                    inputs |= pieces.model_inputs[value]
    consumes = sorted({other for piece in group for other in pieces.dependencies[piece]} - group)
    names = tuple(dict.fromkeys(flow.calls[pieces.calls[piece]].module for piece in sorted(group)))
    return Branch(names, tuple(sorted(inputs)), tuple(pieces.names[piece] for piece in consumes))


def outermost_modules(names: Sequence[str], all_names: Iterable[str]) -> tuple[str, ...]:
    """The outermost modules that contain the pieces `names` and none of the other pieces in `all_names`."""
    inside = set(names)
    others = [name for name in all_names if name not in inside]
    modules: dict[str, None] = {}
    for name in names:
        while (parent := name.rpartition(".")[0]) and not any(other.startswith(f"{parent}.") for other in others):
            name = parent
        modules[name] = None
    return tuple(modules)

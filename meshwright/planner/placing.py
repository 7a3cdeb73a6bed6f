"""Which branches of a model can live on different ranks of the tensor axis, and on which each of them does.

    a branch can be placed   if its modules are called once, are in no other branch and share no weight        placeable
    seconds of a branch      = both passes of a rank's share of the batch + the optimizer's step of its weights
                               + combining their gradients over the replicate axis                               seconds
    rank of a branch         = longest first, each to the rank that has least so far                            assigned
    recomputing              where no block that is computed again has a branch inside                are_computed_again
    what is shared           is left whole, or split along the same axis as the model's structure says            beside

Towers and heads are not placed together: a plan has the ones or the others. What else keeps a plan from being run,
`Question.refuses` says.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.blocks.module_names import within
from meshwright.plan import Axes, Split
from meshwright.planner.outline import Outline, Piece, Placeable
from meshwright.planner.question import Question
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import Parameter
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import group

_WHOLE = Split(kind="none")


def placeable(structure: Structure, parameters: Iterable[Parameter], calls: Mapping[str, int]) -> tuple[Placeable, ...]:
    """`calls`: how often each module is called in a forward pass."""
    holders = [name.rpartition(".")[0] for parameter in parameters for name in parameter.names]
    found = []
    for together in structure.branches:
        units = [
            tuple(module for module in branch.modules if any(within(holder, module) for holder in holders))
            for branch in together.branches
        ]
        names = [module for unit in units for module in unit]
        free = tuple(
            unit
            for unit in units
            if unit and all(_is_free(module, names, structure) and calls.get(module) == 1 for module in unit)
        )
        if len(free) > 1:
            found.append(Placeable(together.kind, free))
    return tuple(found)


def _is_free(module: str, names: Sequence[str], structure: Structure) -> bool:
    alone = sum(within(module, other) or within(other, module) for other in names) == 1
    tied = any(len({within(name, module) for name in tie.parameters}) > 1 for tie in structure.ties)
    return bool(module) and alone and not tied


def are_computed_again(outline: Outline, kind: str) -> bool:
    """Whether a block that is computed again as a whole would run one of the branches once more."""
    units = next(found.branches for found in outline.placeable if found.kind == kind)
    modules = [module for unit in units for module in unit]
    return any(block != module and within(module, block) for block in outline.profile.blocks for module in modules)


# ---- which rank


def homes(outline: Outline, question: Question, axes: Axes, kind: str) -> dict[str, int]:
    """By module, the rank of the tensor axis that it lives on."""
    key = (axes, kind)
    if key not in outline.homes:
        units = next(found.branches for found in outline.placeable if found.kind == kind)
        costs = [seconds(unit, outline, question, axes) for unit in units]
        ranks = assigned(costs, axes.tensor)
        outline.homes[key] = {module: rank for unit, rank in zip(units, ranks, strict=True) for module in unit}
    return outline.homes[key]


def assigned(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank of each; equal ones in their order, so that the same question has the same answer."""
    filled = [0.0] * ranks
    found = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        found[number] = filled.index(min(filled))
        filled[found[number]] += costs[number]
    return found


def seconds(unit: Sequence[str], outline: Outline, question: Question, axes: Axes) -> float:
    """What a step takes of a rank for this branch."""
    share = -(-question.global_batch // (axes.replicate * axes.shard))
    passes = sum(
        forward + backward
        for piece, (forward, backward) in zip(outline.pieces, outline.seconds(share), strict=True)
        if _home(piece, unit)
    )
    weights = sum(piece.weights for piece in outline.pieces if _home(piece, unit)) / axes.shard
    moved = weights * (3 + 2 * question.optimizer.state) / max(outline.device.bandwidth_bytes_per_s, 1.0)
    replicas = group(axes, ("replicate",), question.cluster)
    combined = collective_s("all_reduce", weights, replicas, question.cluster) if replicas.ranks > 1 and weights else 0
    return passes + moved + combined


def _home(piece: Piece, modules: Iterable[str]) -> str | None:
    return next((module for module in modules if within(piece.name, module)), None)


def rank_pieces(
    outline: Outline, where: Mapping[str, int], tensor: int, split: bool, recompute: str
) -> list[tuple[Piece, ...]]:
    """Of each rank, what it has of every piece: nothing of branches elsewhere, all of its own ones, and of what is
    shared all or, where that is split, its part."""
    whole = outline.rank_pieces(1, recompute)
    shared = outline.rank_pieces(tensor if split else 1, recompute)
    names = [_home(piece, where) for piece in whole]
    return [
        tuple(
            part if home is None else own if where[home] == rank else replace(own, weights=0, saved=0.0)
            for own, part, home in zip(whole, shared, names, strict=True)
        )
        for rank in range(tensor)
    ]


def rank_seconds(
    outline: Outline, where: Mapping[str, int], tensor: int, split: bool, recompute: str, batch: int
) -> list[tuple[float, float]]:
    """Of each rank, the least that both passes of a microbatch take."""
    part, again = (1 / tensor if split else 1.0), outline.again(recompute)
    found = [[0.0, 0.0] for _ in range(tensor)]
    for piece, (forward, backward) in zip(outline.pieces, outline.seconds(batch), strict=True):
        backward += again * forward if piece.again else 0.0
        home = _home(piece, where)
        for rank in range(tensor) if home is None else (where[home],):
            found[rank][0] += forward * (part if home is None else 1.0)
            found[rank][1] += backward * (part if home is None else 1.0)
    return [(forward, backward) for forward, backward in found]


# ---- what is shared


def shared_groups(outline: Outline, where: Iterable[str]) -> list[SplitGroup]:
    splits = outline.structure.splits if outline.structure else ()
    inside = tuple(where)
    return [g for g in splits if not any(within(s.module, module) for s in g.splits for module in inside)]


def beside(outline: Outline, where: Iterable[str], tensor: int, split: bool) -> dict[str, Split]:
    """What a plan says of the layers outside of branches: whole, but for those that are to be split and can be."""
    named = [g.splits[0].module for g in shared_groups(outline, where) if not (split and _divides(tensor, g))]
    return dict.fromkeys(dict.fromkeys(map(_pattern, named)), _WHOLE)


def can_be_split(outline: Outline, where: Iterable[str], tensor: int) -> bool:
    return any(_divides(tensor, group) for group in shared_groups(outline, where))


def _divides(ranks: int, found: SplitGroup) -> bool:
    return found.degree % ranks == 0 or all(split.kind == "vocabulary" for split in found.splits)


def _pattern(module: str) -> str:
    """One for all blocks of a list."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))

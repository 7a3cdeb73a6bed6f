"""Decides which branches of a model can be placed on different ranks of the tensor axis, and on which rank each is.

    a branch can be placed    if its modules are called once, are in no other branch and share no weight
                                                                                                   find_branch_groups
    seconds of a branch       = forward and backward pass of the local batch + optimizer step of its weights
                                + all-reduce of its gradients over the replicate axis              branch_seconds
    rank of a branch          = slowest branch first, each to the rank with the least work so far  assign_ranks
    recomputation             only where no recomputed block contains a branch               lie_in_recomputed_blocks
    layers outside branches   are replicated, or split over the same tensor axis                   shared_layer_splits

A plan places towers or heads, not both. `PlanningInputs.check_plan` decides whether the executor can run such a plan.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from meshwright.blocks.module_names import is_inside
from meshwright.plan_fields.groups import Axes, Split
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.model_summary import BranchGroup, ModelSummary, PieceSummary
from meshwright.profile.structure.splits import SplitGroup
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import Parameter
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import group_of_axes

_WHOLE = Split(kind="none")


def find_branch_groups(
    structure: Structure, parameters: Iterable[Parameter], calls: Mapping[str, int]
) -> tuple[BranchGroup, ...]:
    """Returns the groups of at least two branches that can be placed on different ranks; empty if there are none.
    `calls` says how often each module is called in a forward pass."""
    owners = [name.rpartition(".")[0] for parameter in parameters for name in parameter.names]
    groups = []
    for found in structure.branches:
        branches = [
            tuple(module for module in branch.modules if any(is_inside(owner, module) for owner in owners))
            for branch in found.branches
        ]
        names = [module for branch in branches for module in branch]
        independent = tuple(
            branch
            for branch in branches
            if branch and all(_is_independent(module, names, structure) and calls.get(module) == 1 for module in branch)
        )
        if len(independent) > 1:
            groups.append(BranchGroup(found.kind, independent))
    return tuple(groups)


def _is_independent(module: str, names: Sequence[str], structure: Structure) -> bool:
    """Whether the module neither contains nor lies in another of `names`, the modules of all branches, and shares no
    weight with modules outside of it."""
    is_single = sum(is_inside(module, other) or is_inside(other, module) for other in names) == 1
    is_tied = any(len({is_inside(name, module) for name in tie.parameters}) > 1 for tie in structure.ties)
    return bool(module) and is_single and not is_tied


def lie_in_recomputed_blocks(summary: ModelSummary, kind: str) -> bool:
    """Whether a module of the branches of this kind ("towers" or "heads") lies inside a larger block that is recomputed
    as a whole."""
    branches = next(group.branches for group in summary.branch_groups if group.kind == kind)
    modules = [module for branch in branches for module in branch]
    return any(block != module and is_inside(module, block) for block in summary.profile.blocks for module in modules)


# ---- the rank of each branch


def branch_ranks(summary: ModelSummary, inputs: PlanningInputs, axes: Axes, kind: str) -> dict[str, int]:
    """Returns, for each module of the branches of this kind ("towers" or "heads"), the rank of the tensor axis that it
    is placed on."""
    key = (axes, kind)
    if key not in summary.branch_ranks:
        branches = next(group.branches for group in summary.branch_groups if group.kind == kind)
        costs = [branch_seconds(branch, summary, inputs, axes) for branch in branches]
        ranks = assign_ranks(costs, axes.tensor)
        summary.branch_ranks[key] = {
            module: rank for branch, rank in zip(branches, ranks, strict=True) for module in branch
        }
    return summary.branch_ranks[key]


def assign_ranks(costs: Sequence[float], ranks: int) -> list[int]:
    """Returns the rank of each branch, given the costs of the branches: the most expensive first, each to the rank with
    the lowest cost so far. Branches of equal cost keep their order, which makes the result deterministic."""
    rank_costs = [0.0] * ranks
    assigned = [0] * len(costs)
    for branch in sorted(range(len(costs)), key=lambda branch: -costs[branch]):
        assigned[branch] = rank_costs.index(min(rank_costs))
        rank_costs[assigned[branch]] += costs[branch]
    return assigned


def branch_seconds(branch: Sequence[str], summary: ModelSummary, inputs: PlanningInputs, axes: Axes) -> float:
    """The predicted seconds per step that a rank spends on this branch: forward and backward pass, optimizer and
    all-reduce."""
    local_batch = -(-inputs.global_batch // (axes.replicate * axes.shard))
    passes = sum(
        forward + backward
        for piece, (forward, backward) in zip(summary.pieces, summary.piece_seconds(local_batch), strict=True)
        if _branch_of(piece, branch)
    )
    weights = sum(piece.trained_bytes for piece in summary.pieces if _branch_of(piece, branch)) / axes.shard
    optimizer_bytes = weights * (3 + 2 * inputs.optimizer.state_ratio)
    optimizer_s = optimizer_bytes / max(summary.device.bandwidth_bytes_per_s, 1.0)
    replicas = group_of_axes(axes, ("replicate",), inputs.cluster)
    all_reduce_s = (
        collective_s("all_reduce", weights, replicas, inputs.cluster) if replicas.ranks > 1 and weights else 0
    )
    return passes + optimizer_s + all_reduce_s


def _branch_of(piece: PieceSummary, modules: Iterable[str]) -> str | None:
    """The one of the branch modules that contains the piece; None if no branch contains it."""
    return next((module for module in modules if is_inside(piece.name, module)), None)


def rank_pieces(
    summary: ModelSummary, ranks: Mapping[str, int], tensor: int, split: bool, recompute: str
) -> list[tuple[PieceSummary, ...]]:
    """For each rank of the tensor axis, the pieces of the model with the bytes that this rank stores. A branch is
    complete on the rank that `ranks` assigns it to and has zero bytes on all other ranks. Pieces outside of the
    branches are complete on every rank or, if `split` is True, divided among the ranks."""
    whole_pieces = summary.rank_pieces(1, recompute)
    shared_pieces = summary.rank_pieces(tensor if split else 1, recompute)
    branches = [_branch_of(piece, ranks) for piece in whole_pieces]
    return [
        tuple(
            shared
            if branch is None
            else whole
            if ranks[branch] == rank
            else replace(whole, weight_bytes=0, trained_bytes=0, saved_bytes=0.0)
            for whole, shared, branch in zip(whole_pieces, shared_pieces, branches, strict=True)
        )
        for rank in range(tensor)
    ]


def rank_seconds(
    summary: ModelSummary, ranks: Mapping[str, int], tensor: int, split: bool, recompute: str, batch: float
) -> list[tuple[float, float]]:
    """For each rank of the tensor axis, lower bounds of the seconds of a microbatch of `batch` samples, as a pair
    (forward, backward). `ranks` gives the rank of each branch module. If `split` is True, pieces outside of the
    branches are divided among the ranks."""
    shared_part, recomputed = (1 / tensor if split else 1.0), summary.recomputed_share(recompute)
    seconds = [[0.0, 0.0] for _ in range(tensor)]
    for piece, (forward, backward) in zip(summary.pieces, summary.piece_seconds(batch), strict=True):
        backward += recomputed * forward if piece.recomputable else 0.0
        branch = _branch_of(piece, ranks)
        own_ranks, part = (range(tensor), shared_part) if branch is None else ((ranks[branch],), 1.0)
        for rank in own_ranks:
            seconds[rank][0] += forward * part
            seconds[rank][1] += backward * part
    return [(forward, backward) for forward, backward in seconds]


# ---- layers outside of the branches


def shared_groups(summary: ModelSummary, branches: Iterable[str]) -> list[SplitGroup]:
    """The split groups that contain no module of the branches."""
    groups = summary.structure.splits if summary.structure else ()
    modules = tuple(branches)
    return [g for g in groups if not any(is_inside(s.module, module) for s in g.splits for module in modules)]


def shared_layer_splits(summary: ModelSummary, branches: Iterable[str], tensor: int, split: bool) -> dict[str, Split]:
    """Returns the `modules.splits` of a plan for layers outside of the branches. A plan splits all layers that it does
    not name there, therefore the result names the layers that are not split: all of them or, if `split` is True, those
    that cannot be divided among `tensor` ranks."""
    whole = [g.splits[0].module for g in shared_groups(summary, branches) if not (split and _divides(tensor, g))]
    return dict.fromkeys(dict.fromkeys(map(_pattern, whole)), _WHOLE)


def can_be_split(summary: ModelSummary, branches: Iterable[str], tensor: int) -> bool:
    """Whether at least one layer outside of the branches can be split over `tensor` ranks."""
    return any(_divides(tensor, group) for group in shared_groups(summary, branches))


def _divides(ranks: int, group: SplitGroup) -> bool:
    return group.degree % ranks == 0 or all(split.kind == "vocabulary" for split in group.splits)


def _pattern(module: str) -> str:
    """The module's name with numbers replaced by `*`. It matches the same module of all blocks in a list."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))

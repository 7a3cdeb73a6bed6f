"""Branches of a model (towers or heads) that are placed on different ranks of the tensor axis: what each rank has of
the model, what the ranks send each other, and how long they wait for each other. parallel/branches/branches.py runs
them.

Each rank has the model without the branches that are placed on other ranks. It computes, keeps, combines and updates

    shared modules + Σ branches of the rank                                                   branch_rank_profiles

In every microbatch, y is the result of a branch, and x the input of one or more branches, if parameters before it are
trained:

    forward    broadcast of the y of every branch                                             branch_messages
    backward   all_reduce of the gradient of x, once for all branches that have this input    branch_messages
    memory     every y is on every rank                                                       all_result_bytes

In each of m microbatches a rank takes f seconds forward and b backward, including messages along the tensor axis, and e
seconds after the last one. The ranks wait for each other where they use the branches' results, and where gradients of
shared inputs are summed:

    step = max f + (m - 1) · max (f + b) + max (b + e)     where no gradient is summed: towers      synchronized_step_s
    step = m · (max f + max b) + max e                     where one is: heads                      synchronized_step_s

y is assumed to be the result of the last operator of a branch in the forward pass, x that of the last operator of its
backward pass whose result grows with the batch. Messages are priced as if no other branch sent at the same time,
buffers as if every rank had all of them, and a branch inside of one of several equal blocks as if it were in all of
them. A plan that places branches and divides the sequence is priced as if it did not.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.blocks.module_names import is_inside
from meshwright.dtypes import ITEM_BYTES
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Modules
from meshwright.plan_rules.table import check_rules
from meshwright.profile.values import MemoryChange, ModelProfile, Operator, Phase, TraceSegment
from meshwright.simulator.tensor.messages import TensorMessage


def places_branches(plan: Plan) -> bool:
    """Whether the plan places branches on ranks of a tensor axis."""
    return bool(plan.modules.branches) and plan.axes.tensor > 1


def check_branches(profile: ModelProfile, plan: Plan) -> None:
    layers = {layer for segment in profile.segments for layer in _layers(segment)}
    for name in plan.modules.branches:
        if not any(is_inside(layer, name) for layer in layers):
            raise InputError(f"plan.modules.branches: the model has no module {name!r}{did_you_mean(name, layers)}")


def _layers(segment: TraceSegment) -> Iterator[str]:
    """Yields the names of the layers of the segment's operators, in each of its equal blocks."""
    for operator in segment.operators:
        for block in segment.blocks or (segment.unit,):
            yield block + operator.layer[len(segment.unit) :] if segment.blocks else operator.layer


# ---- what a rank has


def branch_rank_profiles(profile: ModelProfile, plan: Plan) -> tuple[ModelProfile, ...]:
    """The profile of each rank of the tensor axis, without the branches that are placed on other ranks. Nothing inside
    a branch is split. If the plan places no branches, the result is one unchanged profile for all ranks."""
    if not places_branches(plan):
        return (profile,)
    check_rules(plan)
    check_branches(profile, plan)
    whole = without_branch_splits(profile, plan)
    return tuple(
        _without(whole, [name for name, branch_rank in plan.modules.branches.items() if branch_rank != rank])
        for rank in range(plan.axes.tensor)
    )


def without_branch_splits(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile with all branches, in which nothing inside a branch is split."""
    structure, branches = profile.structure, plan.modules.branches
    if not places_branches(plan) or structure is None:
        return profile
    outside = [g for g in structure.splits if not any(_is_in_any(s.module, branches) for s in g.splits)]
    return replace(profile, structure=replace(structure, splits=tuple(outside)))


def plan_outside_branches(profile: ModelProfile, plan: Plan) -> Plan:
    """The plan for the modules outside of branches: without splits that only name layers inside branches, and without
    `sequence`."""
    if not places_branches(plan):
        return plan
    names = [name.rpartition(".")[0] for parameter in profile.parameters for name in parameter.names]
    shared = [name for name in names if not _is_in_any(name, plan.modules.branches)]
    splits = {
        pattern: split
        for pattern, split in plan.modules.splits.items()
        if any(Modules(splits={pattern: split}).split_of(name) for name in shared)
    }
    return plan.model_copy(update={"modules": plan.modules.model_copy(update={"splits": splits, "sequence": False})})


def _is_in_any(module: str, branches: Iterable[str]) -> bool:
    return any(is_inside(module, branch) for branch in branches)


def _without(profile: ModelProfile, removed: Sequence[str]) -> ModelProfile:
    """The profile without the modules `removed`."""
    blocks = {segment.unit: segment.blocks for segment in profile.segments if segment.blocks}

    def remaining_tensors(change: MemoryChange) -> int:
        """The number of tensors of the change that remain. If each block of a segment has one of them, one remains for
        each remaining block."""
        if change.tensor_count > 1:
            unit = next(unit for unit in blocks if is_inside(change.layer, unit))
            return sum(not _is_in_any(block, removed) for block in blocks[unit])
        return int(not _is_in_any(change.layer, removed))

    segments = []
    for segment in profile.segments:
        remaining = tuple(block for block in segment.blocks if not _is_in_any(block, removed))
        if segment.blocks and remaining:
            removed_changes = [
                c for c in segment.changes if not is_inside(c.layer, segment.unit) and _is_in_any(c.layer, removed)
            ]
            changes = tuple(c for c in segment.changes if c not in removed_changes)
            segments.append(replace(segment, blocks=remaining, changes=changes))
            continue
        numbers = [
            number
            for number, operator in enumerate(segment.operators)
            if not segment.blocks and not _is_in_any(operator.layer, removed)
        ]
        changes = tuple(
            replace(change, after_operators=bisect_left(numbers, change.after_operators), tensor_count=count)
            for change in segment.changes
            if not (segment.blocks and is_inside(change.layer, segment.unit)) and (count := remaining_tensors(change))
        )
        if numbers or changes:
            operators = tuple(segment.operators[number] for number in numbers)
            segments.append(replace(segment, blocks=(), operators=operators, changes=changes))
    return replace(
        profile,
        segments=tuple(segments),
        parameters=tuple(p for p in profile.parameters if not all(_is_in_any(name, removed) for name in p.names)),
        blocks=tuple(block for block in profile.blocks if not _is_in_any(block, removed)),
    )


# ---- what ranks send each other


def branch_messages(profile: ModelProfile, plan: Plan, batch: float) -> list[TensorMessage]:
    """The messages that the plan's branches need in a microbatch; empty if the plan places no branches. `profile` is
    that of the whole model."""
    if not places_branches(plan):
        return []
    branches = plan.modules.branches
    results = [TensorMessage("broadcast", result_bytes(profile, name, batch), 1, True) for name in branches]
    gradients = {}
    for name in branches:
        if (source := _input_source(profile, plan, name)) is not None and (
            size := _last_result_bytes(profile, name, "backward", batch)
        ):
            gradients[source, size] = TensorMessage("all_reduce", size, 1, False)
    return [message for message in (*results, *gradients.values()) if message.bytes]


def sums_gradients(messages: Iterable[TensorMessage]) -> bool:
    """Whether the branch messages include a sum of gradients."""
    return any(not message.forward for message in messages)


def result_bytes(profile: ModelProfile, branch: str, batch: float) -> float:
    """The bytes of a branch's result."""
    return _last_result_bytes(profile, branch, "forward", batch)


def all_result_bytes(profile: ModelProfile, plan: Plan, batch: float) -> float:
    """The bytes of the results of all branches, which every rank keeps. The rank that computes a branch thus has its
    result twice. 0 if the plan places no branches."""
    if not places_branches(plan):
        return 0.0
    return sum(result_bytes(profile, name, batch) for name in plan.modules.branches)


def _input_source(profile: ModelProfile, plan: Plan, name: str) -> tuple[str, ...] | None:
    """The names of the modules that produce the input of a branch, which are equal for branches that share their input;
    None if the input needs no gradient, because it is the model's input or nothing outside of branches is trained."""
    groups = profile.structure.branches if profile.structure else ()
    branches = [branch for group in groups for branch in group.branches]
    branch = next((branch for branch in branches if name in branch.modules), None)
    if branch is not None and branch.modules[0] != name:
        return (branch.modules[branch.modules.index(name) - 1],)
    trained = any(
        parameter.trainable and not _is_in_any(parameter.names[0], plan.modules.branches)
        for parameter in profile.parameters
    )
    if not trained:
        return None
    return (branch.consumes or None) if branch is not None else (name,)


@dataclass(frozen=True)
class _Result:
    """The bytes of an operator's result, and whether they grow with the batch."""

    bytes: float
    grows: bool


def _last_result_bytes(profile: ModelProfile, branch: str, phase: Phase, batch: float) -> float:
    for segment in reversed([segment for segment in profile.segments if segment.phase == phase]):
        is_branch_block = any(is_inside(block, branch) for block in segment.blocks)
        for operator in reversed(segment.operators):
            if is_branch_block or is_inside(operator.layer, branch):
                result = _operator_result(operator, batch, phase)
                if result.bytes and (result.grows or phase == "forward"):
                    return result.bytes
    return 0.0


def _operator_result(operator: Operator, batch: float, phase: Phase) -> _Result:
    """The bytes of an operator's result, as far as they follow from its shape; 0 for views and operators without a
    shape."""
    item = ITEM_BYTES.get(operator.dtype, 4)
    if operator.kind == "view":
        return _Result(0.0, grows=False)
    numbers = [size.at(batch) for size in operator.shape]
    grows = [bool(size.linear or size.square) for size in operator.shape]
    if operator.kind == "matmul":
        count, m, n, _ = numbers
        return _Result(count * m * n * item, any(grows[:3]))
    if operator.kind == "attention":
        count, heads, queries, _, width = numbers[:5]
        return _Result(count * heads * queries * width * item, grows[0])
    if operator.kind == "convolution":
        count, images, height, width, channels, _, stride, _ = numbers
        if phase == "backward":
            return _Result(count * images * height * width * item, grows[0])
        return _Result(count * channels * (height / stride) * (width / stride) * item, grows[0])
    if operator.name == "_to_copy":  # to another type
        return _Result(max(0.0, operator.bytes.at(batch) - numbers[0] * item), grows[0])
    return _Result(numbers[0] * item, grows[0]) if numbers else _Result(0.0, grows=False)


# ---- how long they wait for each other


@dataclass(frozen=True)
class RankWork:
    """Seconds of one rank: of the forward and of the backward pass of a microbatch, and after the last microbatch."""

    forward_s: float
    backward_s: float
    end_s: float


def synchronized_step_s(ranks: Sequence[RankWork], microbatches: int, *, summed: bool) -> float:
    """Seconds of a step in which ranks wait for each other. `summed` says whether gradients of shared inputs are
    summed."""
    forward = max(rank.forward_s for rank in ranks)
    if summed:
        backward = max(rank.backward_s for rank in ranks)
        return microbatches * (forward + backward) + max(rank.end_s for rank in ranks)
    both = max(rank.forward_s + rank.backward_s for rank in ranks)
    return forward + (microbatches - 1) * both + max(rank.backward_s + rank.end_s for rank in ranks)

"""Branches that live on different ranks of the tensor axis (parallel/branches/branches.py runs them): what each rank
has of the model, what the ranks exchange, and how long they wait for each other.

Each rank has the model without the branches of the others: it computes, keeps, combines and updates

    shared + Σ own branches                                                                              held

In every microbatch, y the result of a branch, x what several of them are given and that is trained:

    forward    broadcast y, of every branch                                                              handed
    backward   all_reduce of the gradient of x, once for all branches that are given it                  handed
    memory     every y lies on every rank, as it was handed on                                           results_bytes

Of m microbatches a rank works f seconds forward and b backward, exchange along the tensor axis included, and e behind
the last one. All meet where they use the branches' results, and where gradients of shared inputs are summed:

    step = max f + (m - 1) · max (f + b) + max (b + e)     where nothing is summed: towers               together_s
    step = m · (max f + max b) + max e                     where something is: heads                     together_s

y is taken to be what the last operator of a branch makes in the forward pass, x what the last one whose result grows
with the batch makes in the backward pass. Exchange is priced as if no other branch ran beside it, buffers as if all
ranks had all, and a branch inside of one of several equal blocks as if it ran everywhere. A plan that divides the
sequence beside branches is priced as if it did not.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from meshwright.blocks.module_names import within
from meshwright.errors import InputError, did_you_mean
from meshwright.plan import Modules, Plan
from meshwright.profile.values import ITEM_BYTES, Change, ModelProfile, Operator, Phase, Stretch
from meshwright.simulator.tensor.messages import Message


def is_apart(plan: Plan) -> bool:
    """Whether the plan has branches that several ranks could hold."""
    return bool(plan.modules.branches) and plan.axes.tensor > 1


def check_apart(profile: ModelProfile, plan: Plan) -> None:
    if plan.axes.pipeline > 1:
        raise InputError(
            f"plan.modules.branches.{next(iter(plan.modules.branches))} lives on one rank of the tensor axis, which"
            f" works without a pipeline: of {plan.summary()} leave out the branches, or set axes.pipeline to 1"
        )
    known = {layer for stretch in profile.stretches for layer in _layers(stretch)}
    for name in plan.modules.branches:
        if not any(within(layer, name) for layer in known):
            raise InputError(f"plan.modules.branches: the model has no module {name!r}{did_you_mean(name, known)}")


def _layers(stretch: Stretch) -> Iterator[str]:
    for operator in stretch.operators:
        for block in stretch.blocks or (stretch.unit,):
            yield block + operator.layer[len(stretch.unit) :] if stretch.blocks else operator.layer


# ---- what a rank has


def held(profile: ModelProfile, plan: Plan) -> tuple[ModelProfile, ...]:
    """The model as each rank of the tensor axis has it, nothing in a branch split; itself, once, where no branches are
    placed."""
    if not is_apart(plan):
        return (profile,)
    check_apart(profile, plan)
    whole = unsplit(profile, plan)
    return tuple(
        _without(whole, [name for name, home in plan.modules.branches.items() if home != rank])
        for rank in range(plan.axes.tensor)
    )


def unsplit(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The model with all branches, in which nothing is split."""
    structure, branches = profile.structure, plan.modules.branches
    if not is_apart(plan) or structure is None:
        return profile
    beside = [g for g in structure.splits if not any(_lies_in(s.module, branches) for s in g.splits)]
    return replace(profile, structure=replace(structure, splits=tuple(beside)))


def around(profile: ModelProfile, plan: Plan) -> Plan:
    """The plan of what is shared: without splits that only name layers in branches."""
    if not is_apart(plan):
        return plan
    names = [name.rpartition(".")[0] for parameter in profile.parameters for name in parameter.names]
    shared = [name for name in names if not _lies_in(name, plan.modules.branches)]
    splits = {
        pattern: split
        for pattern, split in plan.modules.splits.items()
        if any(Modules(splits={pattern: split}).split_of(name) for name in shared)
    }
    return plan.model_copy(update={"modules": plan.modules.model_copy(update={"splits": splits, "sequence": False})})


def _lies_in(module: str, branches: Iterable[str]) -> bool:
    return any(within(module, branch) for branch in branches)


def _without(profile: ModelProfile, gone: Sequence[str]) -> ModelProfile:
    blocks = {stretch.unit: stretch.blocks for stretch in profile.stretches if stretch.blocks}

    def times(change: Change) -> int:
        """How often it still happens: what all blocks of a stretch take at once, those that are left do."""
        if change.times > 1:
            unit = next(unit for unit in blocks if within(change.layer, unit))
            return sum(not _lies_in(block, gone) for block in blocks[unit])
        return int(not _lies_in(change.layer, gone))

    made = []
    for stretch in profile.stretches:
        own = tuple(block for block in stretch.blocks if not _lies_in(block, gone))
        if stretch.blocks and own:
            of_others = [c for c in stretch.changes if not within(c.layer, stretch.unit) and _lies_in(c.layer, gone)]
            changes = tuple(c for c in stretch.changes if c not in of_others)
            made.append(replace(stretch, blocks=own, changes=changes))
            continue
        kept = [
            number
            for number, operator in enumerate(stretch.operators)
            if not stretch.blocks and not _lies_in(operator.layer, gone)
        ]
        changes = tuple(
            replace(change, operator=bisect_left(kept, change.operator), times=left)
            for change in stretch.changes
            if not (stretch.blocks and within(change.layer, stretch.unit)) and (left := times(change))
        )
        if kept or changes:
            operators = tuple(stretch.operators[number] for number in kept)
            made.append(replace(stretch, blocks=(), operators=operators, changes=changes))
    return replace(
        profile,
        stretches=tuple(made),
        parameters=tuple(p for p in profile.parameters if not all(_lies_in(name, gone) for name in p.names)),
        blocks=tuple(block for block in profile.blocks if not _lies_in(block, gone)),
    )


# ---- what ranks exchange


def handed(profile: ModelProfile, plan: Plan, batch: float) -> list[Message]:
    """What a microbatch exchanges for its branches. The profile is the whole model's."""
    if not is_apart(plan):
        return []
    found = [Message("broadcast", result_bytes(profile, name, batch), 1, True) for name in plan.modules.branches]
    given = {}
    for name in plan.modules.branches:
        if (source := _source(profile, plan, name)) is not None and (
            size := _last_made(profile, name, "backward", batch)
        ):
            given[source, size] = Message("all_reduce", size, 1, False)
    return [message for message in (*found, *given.values()) if message.bytes]


def is_summed(messages: Iterable[Message]) -> bool:
    return any(not message.forward for message in messages)


def result_bytes(profile: ModelProfile, branch: str, batch: float) -> float:
    return _last_made(profile, branch, "forward", batch)


def results_bytes(profile: ModelProfile, plan: Plan, batch: float) -> float:
    """Of all branches: every rank has what they were given, and the owner a copy of its own."""
    if not is_apart(plan):
        return 0.0
    return sum(result_bytes(profile, name, batch) for name in plan.modules.branches)


def _source(profile: ModelProfile, plan: Plan, name: str) -> tuple[str, ...] | None:
    """What the input of a branch was made by, if that is trained; equal for branches that share it."""
    known = [b for found in (profile.structure.branches if profile.structure else ()) for b in found.branches]
    branch = next((branch for branch in known if name in branch.modules), None)
    if branch is not None and branch.modules[0] != name:
        return (branch.modules[branch.modules.index(name) - 1],)
    trained = any(
        parameter.trainable and not _lies_in(parameter.names[0], plan.modules.branches)
        for parameter in profile.parameters
    )
    if not trained:
        return None
    return (branch.consumes or None) if branch is not None else (name,)


@dataclass(frozen=True)
class _Made:
    bytes: float
    grows: bool


def _last_made(profile: ModelProfile, branch: str, phase: Phase, batch: float) -> float:
    for stretch in reversed([stretch for stretch in profile.stretches if stretch.phase == phase]):
        own = any(within(block, branch) for block in stretch.blocks)
        for operator in reversed(stretch.operators):
            if own or within(operator.layer, branch):
                made = _made(operator, batch, phase)
                if made.bytes and (made.grows or phase == "forward"):
                    return made.bytes
    return 0.0


def _made(operator: Operator, batch: float, phase: Phase) -> _Made:
    """What it returns, and whether that grows with the batch."""
    item = ITEM_BYTES.get(operator.dtype, 4)
    if operator.kind == "view":
        return _Made(0.0, grows=False)
    numbers = [size.at(batch) for size in operator.shape]
    grows = [bool(size.linear or size.square) for size in operator.shape]
    if operator.kind == "matmul":
        many, m, n, _ = numbers
        return _Made(many * m * n * item, any(grows[:3]))
    if operator.kind == "attention":
        many, heads, queries, _, width = numbers[:5]
        return _Made(many * heads * queries * width * item, grows[0])
    if operator.kind == "convolution":
        many, images, height, width, channels, _, stride, _ = numbers
        if phase == "backward":
            return _Made(many * images * height * width * item, grows[0])
        return _Made(many * channels * (height / stride) * (width / stride) * item, grows[0])
    if operator.name == "_to_copy":  # to another type
        return _Made(max(0.0, operator.bytes.at(batch) - numbers[0] * item), grows[0])
    return _Made(numbers[0] * item, grows[0]) if numbers else _Made(0.0, grows=False)


# ---- how long they wait for each other


@dataclass(frozen=True)
class Work:
    """Seconds of one rank: of a microbatch's passes, and behind the last one."""

    forward_s: float
    backward_s: float
    end_s: float

    def alone_s(self, microbatches: int) -> float:
        return microbatches * (self.forward_s + self.backward_s) + self.end_s


def together_s(ranks: Sequence[Work], microbatches: int, *, summed: bool) -> float:
    """A step of ranks that meet; no rank's own work takes longer."""
    forward = max(rank.forward_s for rank in ranks)
    if summed:
        backward = max(rank.backward_s for rank in ranks)
        return microbatches * (forward + backward) + max(rank.end_s for rank in ranks)
    between = max(rank.forward_s + rank.backward_s for rank in ranks)
    return forward + (microbatches - 1) * between + max(rank.backward_s + rank.end_s for rank in ranks)

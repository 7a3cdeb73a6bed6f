"""What ranks of split layers send each other in every microbatch (`tensor_exchange`).

With n ranks, X and Y the bytes of a layer's whole input and output, and of their gradients. Around layers that are
divided over the tensor axis values are whole:

                                forward                       backward
    first column of a group                                   all_reduce X                        _whole_around
    row of a group              all_reduce Y
    lone column                 all_gather Y                  all_reduce X
    lone row                    all_reduce Y                  all_gather X
    table by vocabulary         all_reduce Y                                                      _looked_up
    head by vocabulary          all_gather Y                  all_reduce X
    head, with `loss`           all_reduce of 1 and of 3 numbers a target      all_reduce X

With `sequence` they are divided along it from the first table or row on; before that, as behind a pipeline's cut, they
are whole. What is whole and meets them (a residual, a lone layer's output) is divided, which gathers its gradient:

    first column of a group     all_gather X                  reduce_scatter X                    _along_sequence
    row of a group              reduce_scatter Y              all_gather Y; the first: 2 all_gather Y
    lone column, head           all_gather X, all_gather Y    reduce_scatter X; but the head: all_gather Y
    lone row                    all_gather X, reduce_scatter Y    all_gather Y, all_gather X
    table                       reduce_scatter Y              all_gather Y
    weights that stay whole                                   all_reduce of their bytes           _whole_weights
        and have a number a token                             all_gather of their bytes

Over the replicate axis they are divided by samples, so that X and Y are n times a rank's own:

    first column of a group     all_gather X                  reduce_scatter X                    _parts_around
    row of a group              reduce_scatter Y              all_gather Y
    lone column, head           all_gather X, all_to_all Y/n  all_to_all Y/n, reduce_scatter X
    lone row                    all_to_all X/n, reduce_scatter Y   all_gather Y, all_to_all X/n
    table                       reduce_scatter Y              all_gather Y

    What n does not divide (words, tokens) travels with room, as if each rank had as much as the first.

    Where a layer's input needs no gradient, nothing of it is sent. Where a block is computed again, its backward pass
    sends what its forward pass did, too. Groups that share an input are counted each, though their gradients are
    summed before they are sent.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.blocks.module_names import within
from meshwright.cluster.cluster import Collective
from meshwright.plan import Plan
from meshwright.profile.structure.marks import INTO, LOSS
from meshwright.profile.structure.splits import SplitGroup, SplitKind
from meshwright.profile.values import ITEM_BYTES, ModelProfile, Operator, Parameter, Stretch
from meshwright.simulator.engine import Engine
from meshwright.simulator.tensor.split_profile import Share, shares
from meshwright.simulator.tensor.standalone_splits import is_lone, with_lone

_EAGER = Engine(name="meshwright")


@dataclass(frozen=True)
class Message:
    """`bytes` of the whole tensor, sent `times` in a pass of one microbatch."""

    collective: Collective
    bytes: float
    times: int
    forward: bool


@dataclass(frozen=True)
class _Crossing:
    """An operator of a split layer at which values come in or go out. `enters`: the first of its group, or a lone
    layer's; `answers`: it computes the gradient of its input; `tokens` of a sample that it works on."""

    operator: Operator
    share: Share
    kind: Literal["column", "row", "table", "head"]
    enters: bool
    lone: bool
    answers: bool
    tokens: int


def tensor_exchange(
    profile: ModelProfile, plan: Plan, batch: float, engine: Engine = _EAGER
) -> tuple[list[Message], list[Message]]:
    """What a microbatch exchanges along the tensor axis, and for layers split over the replicate axis. The profile is
    the whole model's, or a stage's of one that has its lone layers (`with_lone`)."""
    profile = with_lone(profile, plan)
    active = shares(profile, plan)
    along: list[Message] = []
    wide: list[Message] = []
    if not active:
        return along, wide
    walk = _Walk(profile, plan, active)
    for stretch in profile.stretches:
        left = stretch.count if stretch.phase == "forward" else 0
        while left:
            before = walk.divided
            found = list(walk.through(stretch, batch))
            # The unit in which values become divided is not like those behind it.
            times = left if walk.divided == before else 1
            left -= times
            for axis, layer, message in found:
                into = wide if axis == "replicate" else along
                into.append(replace(message, times=times))
                if message.forward and _computed_again(layer, profile, plan, engine):
                    into.append(replace(message, times=times, forward=False))
    return along, wide


def _computed_again(layer: str, profile: ModelProfile, plan: Plan, engine: Engine) -> bool:
    """Ours computes all of a block again, or all but products and attention: what they exchange is sent again."""
    kind = plan.memory.recompute
    if kind == "none" or (kind == "selective" and (engine.again or engine.again_scores)):
        return False
    return any(within(layer, block) for block in profile.blocks)


class _Walk:
    """Goes through the operators of a forward pass. `divided`: the values between split layers are, along the
    sequence."""

    def __init__(self, profile: ModelProfile, plan: Plan, active: Mapping[str, Share]) -> None:
        groups = profile.structure.splits if profile.structure else ()
        self.divided = False
        self._plan = plan
        self._active = active
        self._homes = {split.module: (split.kind, group) for group in groups for split in group.splits}
        self._tokens = 0
        self._answering = _answering(profile)
        self._widths = {name: p.shape[-1] for p in profile.parameters for name in p.names if p.shape}
        self._whole = _whole_weights(profile, self._homes, active) if plan.modules.sequence else {}

    def through(self, stretch: Stretch, batch: float) -> Iterator[tuple[str, str, Message]]:
        """The axis, the layer and what it sends, once."""
        met: set[str] = set()
        crossings = {id(crossing.operator): crossing for crossing in self._crossings(stretch)}
        for operator in stretch.operators:
            layer = operator.layer
            if crossing := crossings.get(id(operator)):
                for message in _sent(crossing, batch, self._plan, self.divided):
                    yield crossing.share.axis, layer, message
                if _is_along(crossing, self._plan) and crossing.kind in ("row", "table"):
                    self.divided, self._tokens = True, crossing.tokens
            if self.divided and layer not in met:
                met.add(layer)
                yield from (("tensor", layer, message) for message in self._of_weights(operator))

    def _of_weights(self, operator: Operator) -> Iterator[Message]:
        tokens = self._tokens
        for parameter in self._whole.get(operator.layer, ()):
            # Products sum over their tokens, all other weights of two dimensions have one of them for each.
            if len(parameter.shape) > 1 and parameter.shape[-2] == tokens and operator.kind != "matmul":
                yield Message("all_gather", parameter.bytes * _room(tokens, self._plan.axes.tensor), 1, False)
            else:
                yield Message("all_reduce", float(parameter.bytes), 1, False)

    def _crossings(self, stretch: Stretch) -> Iterator[_Crossing]:
        entered: set[str] = set()
        for operator in stretch.operators:
            if operator.layer not in self._homes or operator.kind not in ("matmul", "embedding"):
                continue
            kind, home = self._homes[operator.layer]
            answers, tokens = operator.layer in self._answering, self._tokens_of(operator)
            if kind == "vocabulary":
                if share := self._active.get(home.name):
                    found: Literal["table", "head"] = "table" if operator.kind == "embedding" else "head"
                    yield _Crossing(operator, share, found, True, True, answers, tokens)
                continue
            name = operator.split.removeprefix(LOSS).removeprefix(INTO)
            if operator.kind == "matmul" and (share := self._active.get(name)):
                enters = kind != "row" and (is_lone(home) or name not in entered)
                entered |= {name} if enters else set()
                side: Literal["row", "column"] = "row" if kind == "row" else "column"
                yield _Crossing(operator, share, side, enters, is_lone(home), answers, tokens)

    def _tokens_of(self, operator: Operator) -> int:
        """Rows of a product a sample, or of what a table looks up."""
        if operator.kind == "embedding":
            return round(operator.shape[0].linear / self._widths.get(f"{operator.layer}.weight", 1))
        many, m, *_ = operator.shape
        return round(many.constant * m.linear + many.linear * m.constant)


def _whole_weights(
    profile: ModelProfile, homes: Mapping[str, tuple[SplitKind, SplitGroup]], active: Mapping[str, Share]
) -> dict[str, list[Parameter]]:
    """Trained weights that no group divides, by the module that has them."""
    divided = {
        name
        for kind, group in homes.values()
        if group.name in active
        for split in group.splits
        for name in (split.parameter, *([] if split.kind == "row" else [f"{split.module}.bias"]))
    }
    found: dict[str, list[Parameter]] = {}
    for parameter in profile.parameters:
        if parameter.trainable and divided.isdisjoint(parameter.names):
            found.setdefault(parameter.names[0].rpartition(".")[0], []).append(parameter)
    return found


def _answering(profile: ModelProfile) -> set[str]:
    """Layers that compute the gradient of their input: that of their weight sums over samples. One that is computed
    again is taken to."""
    return {
        operator.layer
        for stretch in profile.stretches
        for operator in stretch.operators
        if stretch.phase == "backward" and operator.kind == "matmul"
        if not operator.shape[3].linear and not operator.shape[3].square
    }


def _sent(crossing: _Crossing, batch: float, plan: Plan, divided: bool) -> list[Message]:
    over_samples = crossing.share.axis == "replicate"
    times = crossing.share.ranks if over_samples else 1
    made = _result(crossing.operator, batch) * times
    given = _input(crossing.operator, batch) * times if crossing.operator.kind == "matmul" else 0.0
    if over_samples:
        forward, backward = _parts_around(crossing, given, made)
    elif _is_along(crossing, plan):
        forward, backward = _along_sequence(crossing, given, made, plan.modules.loss, divided)
    else:
        forward, backward = _whole_around(crossing, given, made, plan.modules.loss)
    return [
        Message(collective, size, 1, way)
        for way, sent in ((True, forward), (False, backward))
        for collective, size in sent
    ]


_Sent = list[tuple[Collective, float]]


def _whole_around(crossing: _Crossing, given: float, made: float, loss: bool) -> tuple[_Sent, _Sent]:
    """Forward and backward, where every rank has the whole input and wants the whole output."""
    forward: _Sent = []
    backward: _Sent = []
    if crossing.kind in ("row", "table"):
        forward.append(("all_reduce", made))
    elif crossing.lone:
        forward += _outcome(crossing, made, loss)
    if crossing.answers and crossing.enters and crossing.kind != "table":
        backward.append(("all_reduce", given))
    if crossing.answers and crossing.kind == "row" and crossing.lone:
        backward.append(("all_gather", given))
    return forward, backward


def _along_sequence(crossing: _Crossing, given: float, made: float, loss: bool, divided: bool) -> tuple[_Sent, _Sent]:
    """Forward and backward, where each rank has and wants its part of the sequence; until values are `divided` it has
    all of it."""
    forward: _Sent = []
    backward: _Sent = []
    room = _room(crossing.tokens, crossing.share.ranks)
    if crossing.kind in ("row", "table"):
        if crossing.kind == "row" and crossing.lone:
            forward += [("all_gather", given * room)] if divided else []
            backward += [("all_gather", given)] if crossing.answers else []
        forward.append(("reduce_scatter", made * room))
        joined = 2 if crossing.kind == "row" and not divided else 1
        backward += [("all_gather", made * room)] * joined
        return forward, backward
    if crossing.enters and divided:
        forward.append(("all_gather", given * room))
        backward += [("reduce_scatter", given * room)] if crossing.answers else []
    elif crossing.enters:
        backward += [("all_reduce", given)] if crossing.answers else []
    if crossing.lone:
        forward += _outcome(crossing, made, loss)
        backward += [("all_gather", made * room)] if crossing.kind == "column" else []
    return forward, backward


def _outcome(crossing: _Crossing, made: float, loss: bool) -> _Sent:
    """Of a lone layer whose output is divided: it is gathered, or its scores are compared where they are."""
    operator, ranks = crossing.operator, crossing.share.ranks
    features = int(operator.shape[2].constant)
    if crossing.kind == "head" and loss:
        number = made / features * max(1.0, 4 / ITEM_BYTES.get(operator.dtype, 4))
        return [("all_reduce", number), ("all_reduce", 3 * number)]
    return [("all_gather", made * _room(features, ranks))]


def _is_along(crossing: _Crossing, plan: Plan) -> bool:
    """A layer of single vectors has no sequence to be divided along."""
    return plan.modules.sequence and crossing.share.axis == "tensor" and crossing.tokens > 1


def _room(size: int, ranks: int) -> float:
    """How much longer it is for all ranks to have as much of it as the first."""
    return -(-size // ranks) * ranks / size if size else 1.0


def _parts_around(crossing: _Crossing, given: float, made: float) -> tuple[_Sent, _Sent]:
    """Forward and backward, where each rank has and wants its samples."""
    forward: _Sent = []
    backward: _Sent = []
    part = 1 / crossing.share.ranks
    if crossing.kind in ("row", "table"):
        forward.append(("reduce_scatter", made))
        backward.append(("all_gather", made))
        if crossing.kind == "row" and crossing.lone:
            forward.append(("all_to_all", given * part))
            backward += [("all_to_all", given * part)] if crossing.answers else []
        return forward, backward
    if crossing.enters:
        forward.append(("all_gather", given))
        backward += [("reduce_scatter", given)] if crossing.answers else []
    if crossing.lone:
        forward.append(("all_to_all", made * part))
        backward.append(("all_to_all", made * part))
    return forward, backward


def _result(operator: Operator, batch: float) -> float:
    item = ITEM_BYTES.get(operator.dtype, 4)
    if operator.kind == "embedding":
        return operator.shape[0].at(batch) * item
    many, m, n, _ = (size.at(batch) for size in operator.shape)
    return many * m * n * item


def _input(operator: Operator, batch: float) -> float:
    many, m, _, k = (size.at(batch) for size in operator.shape)
    return many * m * k * ITEM_BYTES.get(operator.dtype, 4)

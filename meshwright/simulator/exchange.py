"""What ranks send each other in a step, and how long that takes: one list for each axis, priced on the cluster.

Split layers exchange in every microbatch (`tensor_exchange`): n ranks, X and Y the bytes of a layer's whole input and
output, and of their gradients. Around layers that are divided over the tensor axis values are whole:

                                forward                       backward
    first column of a group                                   all_reduce X                        _whole_around
    row of a group              all_reduce Y
    lone column                 all_gather Y                  all_reduce X
    lone row                    all_reduce Y                  all_gather X
    table by vocabulary         all_reduce Y                                                      _looked_up
    head by vocabulary          all_gather Y, but with `loss` all_reduce X

With `sequence` they are divided along it; over the replicate axis they are divided by samples, so that X and Y are
n times a rank's own:

    first column of a group     all_gather X                  reduce_scatter X                    _parts_around
    row of a group              reduce_scatter Y              all_gather Y
    lone column, head           all_gather X, all_to_all Y/n  all_to_all Y/n, reduce_scatter X
    lone row                    all_to_all X/n, reduce_scatter Y   all_gather Y, all_to_all X/n
    table                       reduce_scatter Y              all_gather Y

    Where a layer's input needs no gradient, nothing of it is sent. Where a block is computed again, its backward pass
    sends what its forward pass did, too.

Gradients and shards, W the bytes of the rank's parameters but for those split over the replicate axis, in pieces
(`gradient_exchange`; buckets, or blocks where there is a shard axis):

    replicate  all_reduce W / shard, once a step
    shard      reduce_scatter W, in every backward pass; once a step where only the optimizer's state is divided
               all_gather W, in both passes where parameters are divided; else once a step

    pipeline   point_to_point: what crosses a cut, there and back                                 transfer_s

The bytes of a collective are those of communication.py: of the whole tensor, and for an all-to-all what one rank has
of it. traffic.py adds all of them up.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from meshwright.cluster.cluster import Cluster, Collective
from meshwright.plan import Plan
from meshwright.profile.marks import INTO, LOSS
from meshwright.profile.names import within
from meshwright.profile.splits import SplitGroup, SplitKind
from meshwright.profile.values import ITEM_BYTES, ModelProfile, Operator, Stretch
from meshwright.simulator.communication import collective_s
from meshwright.simulator.engine import Engine
from meshwright.simulator.lone import is_lone, with_lone
from meshwright.simulator.placement import Group, group, place
from meshwright.simulator.tensor import Share, shares


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
    layer's; `answers`: it computes the gradient of its input."""

    operator: Operator
    share: Share
    kind: Literal["column", "row", "table", "head"]
    enters: bool
    lone: bool
    answers: bool


def tensor_exchange(profile: ModelProfile, plan: Plan, batch: float) -> tuple[list[Message], list[Message]]:
    """What a microbatch exchanges along the tensor axis, and for layers split over the replicate axis. The profile is
    the whole model's, or a stage's of one that has its lone layers (`with_lone`)."""
    profile = with_lone(profile, plan)
    active = shares(profile, plan)
    along: list[Message] = []
    wide: list[Message] = []
    groups = profile.structure.splits if profile.structure and active else ()
    homes = {split.module: (split.kind, group) for group in groups for split in group.splits}
    answering = _answering(profile) if active else set()
    for stretch in profile.stretches if active else ():
        for crossing in _crossings(stretch, homes, active, answering):
            sent = _sent(crossing, batch, plan)
            layer = crossing.operator.layer
            if plan.memory.recompute == "full" and any(within(layer, block) for block in profile.blocks):
                sent += [replace(message, forward=False) for message in sent if message.forward]
            into = wide if crossing.share.axis == "replicate" else along
            into += [replace(message, times=stretch.count) for message in sent]
    return along, wide


def _crossings(
    stretch: Stretch,
    homes: Mapping[str, tuple[SplitKind, SplitGroup]],
    active: Mapping[str, Share],
    answering: set[str],
) -> Iterator[_Crossing]:
    """In a forward pass; `homes` are the groups by their modules, with the kind of each."""
    entered: set[str] = set()
    for operator in stretch.operators if stretch.phase == "forward" else ():
        if operator.layer not in homes or operator.kind not in ("matmul", "embedding"):
            continue
        kind, home = homes[operator.layer]
        answers = operator.layer in answering
        if kind == "vocabulary":
            if share := active.get(home.name):
                found: Literal["table", "head"] = "table" if operator.kind == "embedding" else "head"
                yield _Crossing(operator, share, found, enters=True, lone=True, answers=answers)
            continue
        name = operator.split.removeprefix(LOSS).removeprefix(INTO)
        if operator.kind == "matmul" and (share := active.get(name)):
            enters = kind != "row" and (is_lone(home) or name not in entered)
            entered |= {name} if enters else set()
            yield _Crossing(operator, share, "row" if kind == "row" else "column", enters, is_lone(home), answers)


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


def _sent(crossing: _Crossing, batch: float, plan: Plan) -> list[Message]:
    over_samples = crossing.share.axis == "replicate"
    times = crossing.share.ranks if over_samples else 1
    made = _result(crossing.operator, batch) * times
    given = _input(crossing.operator, batch) * times if crossing.operator.kind == "matmul" else 0.0
    if over_samples or (plan.modules.sequence and crossing.kind in ("column", "row")):
        forward, backward = _parts_around(crossing, given, made)
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
    elif crossing.lone and not (crossing.kind == "head" and loss):
        forward.append(("all_gather", made))
    if crossing.answers and crossing.enters and crossing.kind != "table":
        backward.append(("all_reduce", given))
    if crossing.answers and crossing.kind == "row" and crossing.lone:
        backward.append(("all_gather", given))
    return forward, backward


def _parts_around(crossing: _Crossing, given: float, made: float) -> tuple[_Sent, _Sent]:
    """Forward and backward, where each rank has and wants its samples, or its part of the sequence."""
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


def messages_s(messages: list[Message], on: Group, cluster: Cluster, forward: bool | None = None) -> float:
    if on.ranks == 1:
        return 0.0
    return sum(
        message.times * collective_s(message.collective, message.bytes, on, cluster)
        for message in messages
        if forward is None or message.forward == forward
    )


@dataclass(frozen=True)
class Gradients:
    """Seconds of combining a rank's gradients once over the replicate axis, of scattering them and of gathering its
    weights over the shard axis; `pieces` follow each other, so that each hides behind the compute of another."""

    replicate_s: float
    scatter_s: float
    gather_s: float
    pieces: int


def gradient_exchange(weights_bytes: float, blocks: int, plan: Plan, cluster: Cluster, engine: Engine) -> Gradients:
    """Of a rank that holds so many bytes of (whole) parameters in so many blocks."""
    axes, shard = plan.axes, plan.axes.shard
    if not weights_bytes:
        return Gradients(0.0, 0.0, 0.0, 1)
    pieces, gradient, weight = in_pieces(weights_bytes, blocks, plan, engine)
    combined = scattered = gathered = 0.0
    if axes.replicate > 1:
        replicate = group(axes, ("replicate",), cluster)
        combined = pieces * collective_s("all_reduce", gradient / shard, replicate, cluster)
    if shard > 1:
        sharded = group(axes, ("shard",), cluster)
        scattered = pieces * collective_s("reduce_scatter", gradient, sharded, cluster)
        gathered = pieces * collective_s("all_gather", weight, sharded, cluster)
    factor = engine.communication
    return Gradients(combined * factor, scattered * factor, gathered * factor, pieces)


def in_pieces(weights_bytes: float, blocks: int, plan: Plan, engine: Engine) -> tuple[int, float, float]:
    """How many, and the bytes of each: of gradients and of weights."""
    sent = weights_bytes * engine.gradient
    pieces = max(1, blocks) if plan.axes.shard > 1 else max(1, round(sent / plan.gradients.bucket_bytes))
    return pieces, sent / pieces, weights_bytes * engine.weight / pieces


def transfer_s(size: float, plan: Plan, cluster: Cluster, engine: Engine) -> float:
    """One message from a stage to the next."""
    if plan.axes.pipeline == 1:
        return 0.0
    groups = place(plan.axes, cluster)
    way = collective_s("point_to_point", over_cut(size, plan, engine), groups["pipeline"], cluster)
    if gathered := behind_cut(size, plan, engine):
        way += collective_s("all_gather", gathered, groups["tensor"], cluster)
    return way * engine.communication


def over_cut(size: float, plan: Plan, engine: Engine) -> float:
    """Each tensor rank sends its part where activations are divided, or where the engine divides them for the way."""
    divided = plan.modules.sequence or engine.scatters
    return _stored(size, plan, engine) / (plan.axes.tensor if divided else 1)


def behind_cut(size: float, plan: Plan, engine: Engine) -> float:
    """What was divided for the way, to be gathered."""
    gathers = engine.scatters and not plan.modules.sequence and plan.axes.tensor > 1
    return _stored(size, plan, engine) if gathers else 0.0


def _stored(size: float, plan: Plan, engine: Engine) -> float:
    return size / 2 if engine.half_weights and plan.numerics.precision in ("bf16", "fp16") else size

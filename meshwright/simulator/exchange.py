"""What ranks send each other in a step, and how long that takes: one list for each axis, priced on the cluster.

tensor     each row-split layer: an all-reduce of its output forward, and one of the input's gradient backward
           (with `sequence` an all-gather and a reduce-scatter of as much); twice forward where it is recomputed;
           tables and heads by vocabulary likewise                                               tensor_exchange
wide       layers split over the replicate axis: the samples of all ranks gathered before them and scattered
           behind, in both passes                                                                tensor_exchange
replicate  an all-reduce of the gradients, of 1/shard of them where there is a shard axis        gradient_exchange
shard      parameters gathered and gradients scattered: in every pass of a microbatch where they are divided,
           once a step where only the optimizer's state is                                       gradient_exchange
pipeline   what crosses a cut, there and back                                                    transfer_s
"""

from dataclasses import dataclass

from meshwright.cluster.cluster import Cluster, Collective
from meshwright.plan import Plan
from meshwright.profile.marks import INTO, LOSS
from meshwright.profile.values import ITEM_BYTES, ModelProfile, Operator
from meshwright.simulator.communication import collective_s
from meshwright.simulator.engine import Engine
from meshwright.simulator.placement import Group, group, place
from meshwright.simulator.tensor import Share, shares


@dataclass(frozen=True)
class Message:
    """`bytes` of the whole tensor, sent `times` in a pass of one microbatch."""

    collective: Collective
    bytes: float
    times: int
    forward: bool


def tensor_exchange(profile: ModelProfile, plan: Plan, batch: float) -> tuple[list[Message], list[Message]]:
    """What a microbatch exchanges along the tensor axis, and for layers split over the replicate axis. The profile is
    the whole model's, or a stage's."""
    active = shares(profile, plan)
    if not active:
        return [], []
    assert profile.structure is not None
    rows = {s.module: g.name for g in profile.structure.splits for s in g.splits if s.kind == "row"}
    columns = {s.module: g.name for g in profile.structure.splits for s in g.splits if s.kind in ("column", "heads")}
    vocabulary = {s.module: g.name for g in profile.structure.splits for s in g.splits if s.kind == "vocabulary"}
    along: list[Message] = []
    wide: list[Message] = []
    again = 2 if plan.memory.recompute == "full" else 1
    for stretch in profile.stretches:
        if stretch.phase != "forward":
            continue
        entered: set[str] = set()
        for operator in stretch.operators:
            share = active.get(operator.split.removeprefix(LOSS).removeprefix(INTO)) or active.get(
                vocabulary.get(operator.layer, "")
            )
            if share is None:
                continue
            into = wide if share.axis == "replicate" else along
            if operator.kind == "matmul" and operator.layer in rows:
                into += _summed(_result(operator, batch), share, stretch.count, again, plan)
            elif operator.kind == "matmul" and operator.layer in columns:
                if share.axis == "replicate" and operator.split not in entered:
                    entered.add(operator.split)
                    into += _gathered(_input(operator, batch), share, stretch.count)
            elif operator.layer in vocabulary and operator.kind in ("embedding", "matmul"):
                into += _looked_up(operator, batch, share, stretch.count, plan)
    return along, wide


def _summed(size: float, share: Share, count: int, again: int, plan: Plan) -> list[Message]:
    """Partial results of a row-split layer; in backward the gradient of the input of its group."""
    if share.axis == "replicate":
        whole = size * share.ranks
        return [Message("reduce_scatter", whole, count, True), Message("all_gather", whole, count, False)]
    if plan.modules.sequence:
        return [
            Message("all_gather", size, count, True),
            Message("reduce_scatter", size, count, True),
            Message("all_gather", size, count * again, False),
            Message("reduce_scatter", size, count * again, False),
        ]
    backward = [Message("all_reduce", size, count * again, False)]
    return [Message("all_reduce", size, count, True), *backward]


def _gathered(size: float, share: Share, count: int) -> list[Message]:
    whole = size * share.ranks
    return [Message("all_gather", whole, count, True), Message("reduce_scatter", whole, count, False)]


def _looked_up(operator: Operator, batch: float, share: Share, count: int, plan: Plan) -> list[Message]:
    if operator.kind == "embedding":
        size = operator.shape[0].at(batch) * ITEM_BYTES.get(operator.dtype, 4)
        return [Message("all_reduce", size, count, True)]
    messages = [Message("all_reduce", _input(operator, batch), count, False)]
    if not plan.modules.loss:
        messages.append(Message("all_gather", _result(operator, batch), count, True))
    return messages


def _result(operator: Operator, batch: float) -> float:
    many, m, n, _ = (size.at(batch) for size in operator.shape)
    return many * m * n * ITEM_BYTES.get(operator.dtype, 4)


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
    sent = weights_bytes * engine.gradient
    pieces = max(1, blocks) if shard > 1 else max(1, round(sent / plan.gradients.bucket_bytes))
    combined = scattered = gathered = 0.0
    if axes.replicate > 1:
        replicate = group(axes, ("replicate",), cluster)
        combined = pieces * collective_s("all_reduce", sent / shard / pieces, replicate, cluster)
    if shard > 1:
        sharded = group(axes, ("shard",), cluster)
        scattered = pieces * collective_s("reduce_scatter", sent / pieces, sharded, cluster)
        gathered = pieces * collective_s("all_gather", weights_bytes * engine.weight / pieces, sharded, cluster)
    factor = engine.communication
    return Gradients(combined * factor, scattered * factor, gathered * factor, pieces)


def transfer_s(size: float, plan: Plan, cluster: Cluster, engine: Engine) -> float:
    """One message from a stage to the next; each tensor rank sends its part where activations are divided, or where
    the engine divides them for the way."""
    if plan.axes.pipeline == 1:
        return 0.0
    whole = size / 2 if engine.half_weights and plan.numerics.precision in ("bf16", "fp16") else size
    divided = plan.modules.sequence or engine.scatters
    groups = place(plan.axes, cluster)
    way = collective_s("point_to_point", whole / plan.axes.tensor if divided else whole, groups["pipeline"], cluster)
    if engine.scatters and not plan.modules.sequence and plan.axes.tensor > 1:
        way += collective_s("all_gather", whole, groups["tensor"], cluster)
    return way * engine.communication

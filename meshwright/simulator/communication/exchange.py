"""What ranks send each other in a step, and how long that takes: one list for each axis, priced on the cluster.

Split layers exchange in every microbatch: crossings.py.

Synchronized BatchNorm of C channels, in every microbatch over all n data ranks (`statistics`):

    forward  all_gather of n (2C + 1) numbers        backward  all_reduce of 2C

Gradients and shards, W the bytes of the rank's parameters but for those split over the replicate axis, in pieces
(`gradient_exchange`; buckets, or blocks where there is a shard axis):

    replicate  all_reduce W / shard, once a step, by the plan's algorithm (combining.py)
    shard      reduce_scatter W, in every backward pass; once a step where only the optimizer's state is divided; an
               engine may all_reduce it instead
               all_gather W, in both passes where parameters are divided; else once a step

    pipeline   point_to_point: what crosses a cut, there and back                                 transfer_s

The bytes of a collective are those of communication.py: of the whole tensor, and for an all-to-all what one rank has
of it. traffic.py adds all of them up.
"""

from dataclasses import dataclass, replace

from meshwright.blocks.module_names import within
from meshwright.cluster.cluster import Cluster, Collective
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.combining import combine_s
from meshwright.simulator.communication.placement import Group, group, neighbours, place
from meshwright.simulator.engine import Engine
from meshwright.simulator.tensor.messages import Message


def statistics(profile: ModelProfile, plan: Plan) -> list[Message]:
    """What a microbatch exchanges among all data ranks for synchronized BatchNorm, in fp32."""
    ranks = plan.data_ranks
    if plan.numerics.batch_norm != "synchronized" or ranks == 1:
        return []
    channels = {name: p.shape[0] for p in profile.parameters for name in p.names if p.shape}
    found: list[Message] = []
    for stretch in profile.stretches:
        for operator in stretch.operators if stretch.phase == "forward" else ():
            size = channels.get(f"{operator.layer}.weight", 0)
            if "batch_norm" in operator.name and size:
                again = plan.memory.recompute != "none" and any(within(operator.layer, b) for b in profile.blocks)
                gathered = Message("all_gather", 4.0 * ranks * (2 * size + 1), stretch.count, True)
                found += [gathered, Message("all_reduce", 4.0 * 2 * size, stretch.count, False)]
                found += [replace(gathered, forward=False)] if again else []
    return found


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
        algorithm = plan.gradients.algorithm if engine.combines else "native"
        combined = pieces * combine_s(gradient / shard, replicate, algorithm, cluster)
    if shard > 1:
        sharded = group(axes, ("shard",), cluster)
        kind: Collective = "all_reduce" if engine.whole_sums else "reduce_scatter"
        scattered = pieces * collective_s(kind, gradient, sharded, cluster)
        gathered = pieces * collective_s("all_gather", weight, sharded, cluster)
    factor = engine.communication
    return Gradients(combined * factor, scattered * factor, gathered * factor, pieces)


def in_pieces(weights_bytes: float, blocks: int, plan: Plan, engine: Engine) -> tuple[int, float, float]:
    """How many, and the bytes of each: of gradients and of weights."""
    sent = weights_bytes * engine.gradient
    pieces = max(1, blocks) if plan.axes.shard > 1 else max(1, round(sent / plan.gradients.bucket_bytes))
    return pieces, sent / pieces, weights_bytes * engine.weight / pieces


def transfer_s(size: float, plan: Plan, cluster: Cluster, engine: Engine, rank: int = 0) -> float:
    """One message from a stage on that rank of a pipeline to the one on the next."""
    if plan.axes.pipeline == 1:
        return 0.0
    way = collective_s("point_to_point", over_cut(size, plan, engine), neighbours(plan.axes, cluster)[rank], cluster)
    if gathered := before_cut(size, plan, engine) or behind_cut(size, plan, engine):
        way += collective_s("all_gather", gathered, place(plan.axes, cluster)["tensor"], cluster)
    return way * engine.communication


def over_cut(size: float, plan: Plan, engine: Engine) -> float:
    """Each tensor rank sends its part where activations are divided, or where the engine divides them for the way."""
    divided = engine.scatters or (plan.modules.sequence and not engine.whole_cuts)
    return _stored(size, plan, engine) / (plan.axes.tensor if divided else 1)


def before_cut(size: float, plan: Plan, engine: Engine) -> float:
    """What is divided along the sequence and has to be whole for the way, to be gathered."""
    gathers = engine.whole_cuts and plan.modules.sequence and plan.axes.tensor > 1
    return _stored(size, plan, engine) if gathers else 0.0


def behind_cut(size: float, plan: Plan, engine: Engine) -> float:
    """What was divided for the way, to be gathered."""
    gathers = engine.scatters and not plan.modules.sequence and plan.axes.tensor > 1
    return _stored(size, plan, engine) if gathers else 0.0


def _stored(size: float, plan: Plan, engine: Engine) -> float:
    return size / 2 if engine.half_weights and plan.numerics.precision in ("bf16", "fp16") else size

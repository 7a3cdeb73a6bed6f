"""What ranks send each other in a step, except tensor-parallel messages (tensor/messages.py), and how long that takes.

Synchronized BatchNorm of C channels, in every microbatch over all n data ranks (`batch_norm_messages`; the predicted
step does not include these messages):

    forward  all_gather of n (2C + 1) numbers        backward  all_reduce of 2C

Gradients and weights, where W is the bytes of the rank's parameters except those that are split over the replicate
axis, and T the bytes of those of them that are trained. They are exchanged in pieces, which are blocks if there is a
shard axis, and else buckets (`gradient_exchange`):

    replicate  all_reduce T / shard, once a step, by the plan's algorithm (combining.py)
    shard      (times the padding of shards that are not even, which is also part of what replicas all-reduce)
               reduce_scatter T, in every backward pass; once a step where only the optimizer's state is divided
               all_gather W, in both passes where parameters are divided; else once a step
    pipeline   point_to_point: the tensor that crosses a cut, forward and backward                transfer_s

As in collectives.py, the bytes of a collective are those of the whole tensor, and of an all-to-all those that one rank
has of it.
"""

from dataclasses import dataclass, replace

from meshwright.blocks.module_names import is_inside
from meshwright.cluster.cluster import Cluster
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.combining import combine_s
from meshwright.simulator.communication.placement import RankGroup, axis_groups, group_of_axes, neighbour_groups
from meshwright.simulator.runtime import Runtime
from meshwright.simulator.tensor.messages import TensorMessage


def batch_norm_messages(profile: ModelProfile, plan: Plan) -> list[TensorMessage]:
    """The messages that all data ranks send each other in a microbatch for synchronized BatchNorm, in fp32; empty if
    the plan does not synchronize BatchNorm or has one data rank."""
    ranks = plan.data_ranks
    if plan.numerics.batch_norm != "synchronized" or ranks == 1:
        return []
    channels = {name: p.shape[0] for p in profile.parameters for name in p.names if p.shape}
    messages: list[TensorMessage] = []
    for segment in profile.segments:
        for operator in segment.operators if segment.phase == "forward" else ():
            size = channels.get(f"{operator.layer}.weight", 0)
            if "batch_norm" in operator.name and size:
                recomputed = plan.memory.recompute != "none" and any(
                    is_inside(operator.layer, block) for block in profile.blocks
                )
                gathered = TensorMessage("all_gather", 4.0 * ranks * (2 * size + 1), segment.block_count, True)
                messages += [gathered, TensorMessage("all_reduce", 4.0 * 2 * size, segment.block_count, False)]
                messages += [replace(gathered, forward=False)] if recomputed else []
    return messages


def messages_s(messages: list[TensorMessage], group: RankGroup, cluster: Cluster, forward: bool | None = None) -> float:
    """Seconds of all messages if `forward` is None, else of those in the forward or in the backward pass."""
    if group.ranks == 1:
        return 0.0
    return sum(
        message.times * collective_s(message.collective, message.bytes, group, cluster)
        for message in messages
        if forward is None or message.forward == forward
    )


@dataclass(frozen=True)
class GradientExchange:
    """Seconds to combine a rank's gradients once over the replicate axis, to scatter its gradients over the shard axis,
    and to gather its weights over the shard axis. Gradients and weights are exchanged in `pieces` (blocks or buckets)
    one after another, so that the exchange of one can hide behind the compute of another."""

    replicate_s: float
    scatter_s: float
    gather_s: float
    pieces: int


def gradient_exchange(
    weights_bytes: float,
    blocks: int,
    plan: Plan,
    cluster: Cluster,
    runtime: Runtime,
    trained_bytes: float | None = None,
    replicated_bytes: float | None = None,
) -> GradientExchange:
    """The time of exchanging gradients and weights, for a rank with `weights_bytes` of parameters in `blocks` blocks.
    `trained_bytes` are those that are not frozen; None means all. `replicated_bytes` are the bytes of the gradients
    that are combined over the replicate axis, if these are others than are scattered over the shard axis (experts)."""
    axes, shard = plan.axes, plan.axes.shard
    if not weights_bytes:
        return GradientExchange(0.0, 0.0, 0.0, 1)
    exchange = runtime.parameter_exchange(plan)
    pieces, gradient, weight = exchanged_pieces(weights_bytes, blocks, plan, runtime, trained_bytes)
    gradient, weight = gradient * plan.shard_padding, weight * plan.shard_padding
    replicate_s = scatter_s = gather_s = 0.0
    if axes.replicate > 1 and gradient:
        replicate = group_of_axes(axes, ("replicate",), cluster)
        combined = gradient
        if replicated_bytes is not None:
            combined = replicated_bytes * exchange.gradient_share / pieces * plan.shard_padding
        replicate_s = pieces * combine_s(combined / shard, replicate, exchange.replicate_algorithm, cluster)
    if shard > 1:
        sharded = group_of_axes(axes, ("shard",), cluster)
        if gradient:
            scatter_s = pieces * collective_s(exchange.shard_collective, gradient, sharded, cluster)
        gather_s = pieces * collective_s("all_gather", weight, sharded, cluster)
    return GradientExchange(replicate_s, scatter_s, gather_s, pieces)


def exchanged_pieces(
    weights_bytes: float, blocks: int, plan: Plan, runtime: Runtime, trained_bytes: float | None = None
) -> tuple[int, float, float]:
    """The number of pieces (blocks with a shard axis, else buckets) in which gradients and weights are exchanged, the
    bytes of gradients in one piece, and the bytes of weights in one piece."""
    exchange = runtime.parameter_exchange(plan)
    gradients = (weights_bytes if trained_bytes is None else trained_bytes) * exchange.gradient_share
    pieces = max(1, blocks) if plan.axes.shard > 1 else max(1, round(gradients / plan.gradients.bucket_bytes))
    return pieces, gradients / pieces, weights_bytes * exchange.weight_share / pieces


def transfer_s(size_bytes: float, plan: Plan, cluster: Cluster, runtime: Runtime, rank: int = 0) -> float:
    """Seconds of one message of `size_bytes` from a stage on this `rank` of the pipeline to a stage on the next rank; 0
    without a pipeline."""
    if plan.axes.pipeline == 1:
        return 0.0
    transfer = runtime.cut_transfer(size_bytes, plan)
    seconds = collective_s("point_to_point", transfer.sent_bytes, neighbour_groups(plan.axes, cluster)[rank], cluster)
    if gathered_bytes := transfer.gathered_before_bytes or transfer.gathered_behind_bytes:
        seconds += collective_s("all_gather", gathered_bytes, axis_groups(plan.axes, cluster)["tensor"], cluster)
    return seconds

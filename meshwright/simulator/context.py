"""What the context axis changes in a prediction. Ranks have the same samples, but each has 1/N of the tokens.

    a rank's compute and activations   those of 1/N of the samples: all of them grow with the tokens   without_context
    gradients and weights              exchanged and divided as if context ranks were shards, or replicas if there is no
                                       shard axis                                                      without_context
    keys and values                    of each attention: b bytes per rank, g those of their gradients key_value_bytes
    masks                              gathered before each attention, if they are made of inputs     key_value_messages

Seconds that the exchange of keys and values adds, with t the seconds of a rank's attention and p those of passing a
message on (`attention_exchange_s`):

                 forward                                backward
    all_gather   all_gather N·b                         all_gather N·b + reduce_scatter N·g
    ring         (N - 1) steps of p(b), each behind     (N - 1) steps of p(b) + p(g), each behind t / N
                 t / N of the attention

Bytes that a rank allocates while its queries attend (`exchange_bytes`), at the moment with most of them. G query heads
share a key-value head, which is copied for each of them; h is half of b if G > 1, the sum over these heads, else 0:

    all_gather   forward    N·b received, N·G·b in tiles, G·(b + g) / 2 of queries and outputs
                 backward   N·b received, N·g sums, 2·N·G·b in tiles and their gradients, N·h,
                            G·b in copies of queries, outputs and their gradients, G·g / 2 the gradient of queries
    ring         forward    2·b at hand and next, G·b in tiles, G·(b + g) of queries and outputs
                 backward   3·b own, at hand and next, 4·g own, sent, received and new, 2·G·b in tiles and their
                            gradients, h, G·b and G·g / 2 as above

A mask makes scores of at most 2²⁶ numbers at a time in addition, which are not predicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshwright.blocks.module_names import is_inside
from meshwright.blocks.recompute import Recompute
from meshwright.cluster.cluster import Cluster
from meshwright.dtypes import ITEM_BYTES
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.profile.structure.structure import Structure
from meshwright.profile.values import BatchPolynomial, MemoryChange, ModelProfile, Operator, Phase, TraceSegment
from meshwright.simulator.communication.collectives import collective_s, overlap
from meshwright.simulator.communication.placement import RankGroup, axis_groups
from meshwright.simulator.compute.attention_calls import AttentionCall, attention_calls
from meshwright.simulator.compute.operator_time import DeviceSpeeds, operator_s
from meshwright.simulator.tensor.messages import TensorMessage

_GRADIENT_BYTES = 4  # gradients of keys and values are added up and sent in fp32


def without_context(plan: Plan) -> Plan:
    """The plan whose ranks exchange gradients and weights as those of `plan` do: context ranks are shards or, without a
    shard axis, replicas."""
    if plan.axes.context == 1:
        return plan
    axes = plan.axes.model_dump()
    axes["shard" if plan.axes.shard > 1 else "replicate"] *= axes.pop("context")
    return plan.model_copy(update={"axes": Axes(**axes)})


@dataclass(frozen=True)
class ContextExchange:
    """How the ranks of a context axis exchange keys and values. `key_value_share` is the number of key-value heads per
    query head, and `recompute` the plan's."""

    ranks: int
    is_ring: bool
    group: RankGroup
    key_value_share: float
    recompute: Recompute = "none"


def context_exchange(cluster: Cluster, structure: Structure | None, plan: Plan) -> ContextExchange | None:
    """How a plan exchanges keys and values; None without a context axis."""
    if plan.axes.context == 1:
        return None
    is_ring = plan.modules.attention_exchange == "ring"
    group = axis_groups(plan.axes, cluster)["context"]
    return ContextExchange(plan.axes.context, is_ring, group, _key_value_share(structure), plan.memory.recompute)


def _key_value_share(structure: Structure | None) -> float:
    """The number of key-value heads per query head, of the first attention of the model."""
    groups = [group for group in structure.splits if group.heads] if structure else []
    return (groups[0].kv_heads or groups[0].heads or 1) / (groups[0].heads or 1) if groups else 1.0


def key_value_bytes(operator: Operator, batch: float, share: float) -> tuple[float, float]:
    """Bytes of a rank's keys and values in one attention, and of their gradients in fp32. `batch` is the number of
    samples whose compute the rank has. Attention of q queries has 4 · q FLOPs for each element of the keys."""
    products = 10 if operator.computes_gradient else 4
    queries = operator.shape[2].at(batch)
    elements = 2 * share * operator.flops.at(batch) / (products * queries) if queries else 0.0
    return elements * ITEM_BYTES.get(operator.dtype, _GRADIENT_BYTES), elements * _GRADIENT_BYTES


def _exchanging_calls(profile: ModelProfile, recompute: Recompute) -> list[tuple[AttentionCall, Phase]]:
    """The calls of attention whose keys and values are exchanged, each with the pass in which they are. Selective
    recomputation saves what attention computes, but exchanges keys and values again."""
    calls = [(call, call.segment.phase) for call in attention_calls(profile)]
    if recompute == "selective":
        is_repeated = partial(_is_in_blocks, profile.blocks)
        calls += [(call, "backward") for call, phase in calls if phase == "forward" and is_repeated(call)]
    return calls


def _is_in_blocks(blocks: Sequence[str], call: AttentionCall) -> bool:
    return any(is_inside(call.operator.layer, block) for block in blocks)


def key_value_messages(profile: ModelProfile, plan: Plan, batch: float) -> list[TensorMessage]:
    """The messages along the context axis in one microbatch. `profile` is that of the rank's stages, and `batch` the
    number of samples whose compute the rank has. Sizes that the ranks do not divide are stated as if they did."""
    ranks, is_ring = plan.axes.context, plan.modules.attention_exchange == "ring"
    share = _key_value_share(profile.structure)
    messages: list[TensorMessage] = []
    for call, phase in _exchanging_calls(profile, plan.memory.recompute):
        operator = call.operator
        size, gradients = key_value_bytes(operator, batch, share)
        times, forward = call.segment.block_count, phase == "forward"
        if call.mask_bytes is not None:
            messages.append(TensorMessage("all_gather", call.mask_bytes.at(ranks * batch), times, forward))
        if is_ring:
            messages.append(TensorMessage("point_to_point", size, (ranks - 1) * times, forward))
        else:  # keys and values are gathered by themselves
            messages.append(TensorMessage("all_gather", ranks * size / 2, 2 * times, forward))
        if operator.computes_gradient and is_ring:
            messages.append(TensorMessage("point_to_point", gradients, (ranks - 1) * times, forward))
        elif operator.computes_gradient:
            messages.append(TensorMessage("reduce_scatter", ranks * gradients / 2, 2 * times, forward))
    return messages


def attention_exchange_s(
    profile: ModelProfile,
    phase: Phase,
    batch: float,
    speeds: DeviceSpeeds,
    exchange: ContextExchange,
    cluster: Cluster,
) -> float:
    """Seconds that the exchange of keys and values adds to a pass of one microbatch. `profile` is that of the rank's
    stage, and `batch` the number of samples whose compute the rank has."""
    tf32 = profile.precision == "tf32"
    seconds = 0.0
    for call, pass_of_exchange in _exchanging_calls(profile, exchange.recompute):
        if pass_of_exchange == phase:
            busy_s = operator_s(call.operator, batch, speeds, phase == "backward", tf32)
            mask_bytes = call.mask_bytes.at(exchange.ranks * batch) if call.mask_bytes else 0.0
            mask_s = collective_s("all_gather", mask_bytes, exchange.group, cluster) if mask_bytes else 0.0
            seconds += call.segment.block_count * (mask_s + _call_s(call.operator, batch, busy_s, exchange, cluster))
    return seconds


def _call_s(operator: Operator, batch: float, busy_s: float, exchange: ContextExchange, cluster: Cluster) -> float:
    """Seconds that one attention adds to its own `busy_s`."""
    ranks, group = exchange.ranks, exchange.group
    keys_values, gradients = key_value_bytes(operator, batch, exchange.key_value_share)
    if not operator.computes_gradient:
        gradients = 0.0
    if not exchange.is_ring:
        scatter_s = collective_s("reduce_scatter", ranks * gradients, group, cluster) if gradients else 0.0
        return collective_s("all_gather", ranks * keys_values, group, cluster) + scatter_s
    pass_on_s = collective_s("point_to_point", keys_values, group, cluster)
    gradients_s = collective_s("point_to_point", gradients, group, cluster) if gradients else 0.0
    exposed_s = overlap(busy_s / ranks, pass_on_s + gradients_s, cluster.kind).exposed_s
    return (ranks - 1) * exposed_s


def rank_memory_profile(profile: ModelProfile, plan: Plan) -> ModelProfile:
    """The profile of the memory of a rank. Saved tensors that do not grow with the batch are tables of positions and
    masks, of which a rank saves the rows of its own tokens. Attention also allocates what it exchanges."""
    if plan.axes.context == 1:
        return profile
    share, calls = _key_value_share(profile.structure), attention_calls(profile)
    segments = []
    for segment in profile.segments:
        calls_of_segment = [call for call in calls if call.segment is segment]
        segments.append(replace(segment, changes=_changes_with_exchange(segment, calls_of_segment, plan, share)))
    return replace(profile, segments=tuple(segments))


def _changes_with_exchange(
    segment: TraceSegment, calls: Sequence[AttentionCall], plan: Plan, share: float
) -> tuple[MemoryChange, ...]:
    """The changes of the segment, with what each call of attention allocates before it returns its results."""
    ordered = [(change.after_operators, 0, _divided_table(change, plan)) for change in segment.changes]
    for call in calls:
        number, operator = call.operators_before, call.operator
        size = _exchange_bytes(operator, plan, share)
        exchange = MemoryChange(number, size, "temporary", operator.layer, split=operator.split)
        ordered += [(number, -2, exchange), (number, -1, replace(exchange, bytes=size.scaled(-1.0)))]
    return tuple(change for _, _, change in sorted(ordered, key=lambda item: item[:2]))


def _divided_table(change: MemoryChange, plan: Plan) -> MemoryChange:
    size = change.bytes
    if change.role != "saved" or not size.constant:
        return change
    return replace(change, bytes=replace(size, constant=size.constant / plan.axes.context))


def _exchange_bytes(operator: Operator, plan: Plan, share: float) -> BatchPolynomial:
    """The bytes of `exchange_bytes` of an attention, as a function of the samples whose compute the rank has."""
    is_ring, backward = plan.modules.attention_exchange == "ring", operator.computes_gradient
    size = exchange_bytes(*key_value_bytes(operator, 1, share), 1 / share, plan.axes.context, is_ring, backward)
    return BatchPolynomial(0.0, size)


def exchange_bytes(
    keys_values: float, gradients: float, heads_per_key: float, ranks: int, is_ring: bool, backward: bool
) -> float:
    """Bytes that a rank allocates while its queries attend to the keys of all ranks, at the moment with most of them.
    `keys_values` and `gradients` are those of the rank, `heads_per_key` is the number of query heads per key-value
    head."""
    b, g, in_tiles = keys_values, gradients, heads_per_key * keys_values
    summed = b / 2 if heads_per_key > 1 else 0.0
    of_queries = in_tiles + heads_per_key * g / 2
    if is_ring and backward:
        return 3 * b + 4 * g + 2 * in_tiles + summed + of_queries
    if is_ring:
        return 2 * b + in_tiles + heads_per_key * (b + g)
    if backward:
        return ranks * (b + g + 2 * in_tiles + summed) + of_queries
    return ranks * (b + in_tiles) + heads_per_key * (b + g) / 2

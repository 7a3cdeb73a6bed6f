"""What a rank exchanges in a step, by axis and collective: the bytes that a run can be counted against.

    split layers   in every microbatch, along the tensor axis and, for wide layers, the replicate axis     _split_layers
    gradients      once a step; over the shard axis as often as its level says                             _gradients
    stages         what crosses the cuts before and behind them, in every microbatch                       _cuts

The sizes are those that exchange.py prices, so what is predicted is what is stated here.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from meshwright.cluster.cluster import Collective
from meshwright.plan import Plan
from meshwright.profile.values import ModelProfile
from meshwright.simulator.engine import Engine
from meshwright.simulator.exchange import behind_cut, in_pieces, over_cut, tensor_exchange
from meshwright.simulator.lone import with_lone
from meshwright.simulator.pipeline_order import stages_of
from meshwright.simulator.stages import Stage, stage_profiles
from meshwright.simulator.tensor import kept_out, split_profile

_EAGER = Engine(name="meshwright")


@dataclass(frozen=True)
class Exchange:
    """`count` collectives along an axis, each of so many `bytes`: of the whole tensor, of what one rank has of it
    where the collective is an all-to-all, of the message where it is a `point_to_point`."""

    axis: str
    collective: Collective
    bytes: float
    count: int


def exchanges(
    profile: ModelProfile, plan: Plan, batch: float, engine: Engine = _EAGER, pipeline_rank: int = 0
) -> tuple[Exchange, ...]:
    """Of a step whose microbatches have `batch` samples a rank; equal collectives are counted together."""
    ranks = plan.axes.pipeline
    marked = with_lone(profile, plan)
    stages = stage_profiles(marked, plan.pipeline.cuts)
    parts = stage_profiles(split_profile(marked, plan), plan.pipeline.cuts)
    own = stages_of(plan.pipeline.schedule, ranks, plan.stages_per_rank, pipeline_rank) if ranks > 1 else (0,)
    rounds = plan.memory.accumulation * plan.pipeline.microbatches
    counted: Counter[tuple[str, Collective, float]] = Counter()
    for found in (
        _split_layers([stages[number] for number in own], plan, batch, rounds),
        _gradients([parts[number] for number in own], plan, engine, rounds),
        _cuts([stages[number] for number in own], plan, batch, engine, rounds),
    ):
        for exchange in found:
            counted[exchange.axis, exchange.collective, exchange.bytes] += exchange.count
    return tuple(Exchange(*what, count) for what, count in sorted(counted.items()) if what[2] and count)


def _split_layers(stages: Iterable[Stage], plan: Plan, batch: float, rounds: int) -> Iterator[Exchange]:
    for stage in stages:
        along, wide = tensor_exchange(stage.profile, plan, batch)
        for axis, messages in (("tensor", along), ("replicate", wide)):
            for message in messages:
                yield Exchange(axis, message.collective, message.bytes, message.times * rounds)


def _gradients(parts: list[Stage], plan: Plan, engine: Engine, rounds: int) -> Iterator[Exchange]:
    alone = {name for part in parts for name in kept_out(part.profile, plan)}
    trained = [p.bytes for part in parts for p in part.profile.parameters if p.trainable and p.names[0] not in alone]
    blocks = sum(len(part.profile.blocks) for part in parts)
    pieces, gradient, weight = in_pieces(sum(trained), blocks, plan, engine)
    shard, level = plan.axes.shard, plan.memory.sharding
    if plan.axes.replicate > 1:
        yield Exchange("replicate", "all_reduce", gradient / shard, pieces)
    if shard > 1:
        yield Exchange("shard", "reduce_scatter", gradient, pieces * (1 if level == "optimizer" else rounds))
        yield Exchange("shard", "all_gather", weight, pieces * (2 * rounds if level == "parameters" else 1))


def _cuts(stages: Iterable[Stage], plan: Plan, batch: float, engine: Engine, rounds: int) -> Iterator[Exchange]:
    """Activations go to the next stage, gradients back to the one before."""
    for stage in stages if plan.axes.pipeline > 1 else ():
        for crossing in (stage.sent.at(batch), stage.received.at(batch)):
            yield Exchange("pipeline", "point_to_point", over_cut(crossing, plan, engine), rounds)
            yield Exchange("tensor", "all_gather", behind_cut(crossing, plan, engine), rounds)

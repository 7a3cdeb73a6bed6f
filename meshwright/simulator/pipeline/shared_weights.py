"""Weights that several ranks of a pipeline use, as a tied table of words: who has them, and what summing their
gradients takes once all passes are done."""

from collections.abc import Sequence

from meshwright.cluster.cluster import Cluster
from meshwright.plan import Plan
from meshwright.profile.values import Parameter
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import Group, place
from meshwright.simulator.engine import Engine
from meshwright.simulator.pipeline.order import stages_of
from meshwright.simulator.pipeline.stages import Stage


def shared_weights(parts: Sequence[Stage], plan: Plan) -> list[tuple[Parameter, frozenset[int]]]:
    """Those that are trained, each with the ranks of the pipeline that have it."""
    if plan.axes.pipeline == 1:
        return []
    holders: dict[str, set[int]] = {}
    known: dict[str, Parameter] = {}
    for rank in range(plan.axes.pipeline):
        for stage in stages_of(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank):
            for parameter in parts[stage].profile.parameters:
                holders.setdefault(parameter.names[0], set()).add(rank)
                known[parameter.names[0]] = parameter
    several = ((known[name], frozenset(ranks)) for name, ranks in holders.items() if len(ranks) > 1)
    return [(parameter, ranks) for parameter, ranks in several if parameter.trainable]


def shared_s(parts: Sequence[Stage], plan: Plan, cluster: Cluster, engine: Engine) -> list[float]:
    """By rank of the pipeline."""
    seconds = [0.0] * plan.axes.pipeline
    divided = 1 if engine.shared_first else plan.axes.shard
    pipeline = place(plan.axes, cluster)["pipeline"]
    for parameter, ranks in shared_weights(parts, plan):
        many = len(ranks)
        near = Group(many, per_node=many, fewest=many, beside=pipeline.beside)
        group = Group(many, nodes=many) if pipeline.nodes > 1 else near
        found = collective_s("all_reduce", parameter.bytes * engine.gradient / divided, group, cluster)
        for rank in ranks:
            seconds[rank] += found * engine.communication
    return seconds

"""Trained parameters that several ranks of a pipeline use, such as a tied embedding: which ranks have them, and how
long it takes to sum their gradients after all passes."""

from collections.abc import Sequence

from meshwright.cluster.cluster import Cluster
from meshwright.plan import Plan
from meshwright.profile.values import Parameter
from meshwright.simulator.communication.collectives import collective_s
from meshwright.simulator.communication.placement import RankGroup, axis_groups
from meshwright.simulator.pipeline.order import stages_of_rank
from meshwright.simulator.pipeline.stages import StageProfile
from meshwright.simulator.runtime import Runtime


def tied_parameters(stages: Sequence[StageProfile], plan: Plan) -> list[tuple[Parameter, frozenset[int]]]:
    """The trained parameters that several pipeline ranks have, each with the set of these ranks; empty without a
    pipeline."""
    if plan.axes.pipeline == 1:
        return []
    holders: dict[str, set[int]] = {}
    by_name: dict[str, Parameter] = {}
    for rank in range(plan.axes.pipeline):
        for stage in stages_of_rank(plan.pipeline.schedule, plan.axes.pipeline, plan.stages_per_rank, rank):
            for parameter in stages[stage].profile.parameters:
                holders.setdefault(parameter.names[0], set()).add(rank)
                by_name[parameter.names[0]] = parameter
    tied = ((by_name[name], frozenset(ranks)) for name, ranks in holders.items() if len(ranks) > 1)
    return [(parameter, ranks) for parameter, ranks in tied if parameter.trainable]


def tied_gradients_s(stages: Sequence[StageProfile], plan: Plan, cluster: Cluster, runtime: Runtime) -> list[float]:
    """For each pipeline rank, the seconds to sum the gradients of the tied parameters that it has."""
    seconds = [0.0] * plan.axes.pipeline
    exchange = runtime.parameter_exchange(plan)
    pipeline = axis_groups(plan.axes, cluster)["pipeline"]
    for parameter, ranks in tied_parameters(stages, plan):
        count = len(ranks)
        group = RankGroup(count, per_node=count, min_per_node=count, bridge_groups=pipeline.bridge_groups)
        if pipeline.nodes > 1:
            group = RankGroup(count, nodes=count)
        size_bytes = parameter.bytes * exchange.gradient_share / exchange.tied_parts
        parameter_s = collective_s("all_reduce", size_bytes, group, cluster)
        for rank in ranks:
            seconds[rank] += parameter_s
    return seconds

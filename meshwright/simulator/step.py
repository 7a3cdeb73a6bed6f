"""The predicted time of a training step under a plan, and where it goes.

    stage      = one microbatch's passes on a pipeline stage, compute and communication            stage_time.py
    passes     = all microbatches on all stages                                                    pipeline_passes.py
    end        = gradients, weights and optimizer after the last microbatch                        step_end.py
    step       = passes + end of the pipeline rank whose end takes longest                         _step_of_equal_ranks
    branches   = the slowest of the ranks that branches are placed on, and its waiting for others  _step_with_branches

In the breakdown, compute, launch, tensor, pipeline, shard, replicate, bubble, input and optimizer add up to the step;
with optimizer state in CPU memory there is also offload, with experts that are divided over ranks expert, and with a
context axis (context.py) context, the exchange of keys and values.
The passes are those of the busiest pipeline rank, the end is that of the pipeline rank whose end takes longest; the two
may be different ranks. If branches of the model are placed on different ranks of the tensor axis (branches.py), the
breakdown is that of the rank that works longest, whose bubble is the time that it waits for other ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright.cluster.cluster import Cluster, Node
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.chunked_loss import chunked_profile
from meshwright.simulator.compute.compiled_profile import compiled_profile
from meshwright.simulator.compute.executed_profile import casts_weights, without_weight_casts
from meshwright.simulator.context import context_exchange, without_context
from meshwright.simulator.data_ranks import groups_are_alike
from meshwright.simulator.experts import divided_profile
from meshwright.simulator.pipeline.shared_weights import tied_gradients_s
from meshwright.simulator.pipeline.stages import stage_profiles
from meshwright.simulator.pipeline.timeline import Timeline
from meshwright.simulator.pipeline_passes import passes_time
from meshwright.simulator.runtime import OUR_RUNTIME, Runtime
from meshwright.simulator.stage_time import StageTime, stage_times
from meshwright.simulator.step_end import step_end
from meshwright.simulator.step_inputs import StepInputs, rank_device, slowest_node
from meshwright.simulator.tensor.branches import (
    RankWork,
    branch_messages,
    branch_rank_profiles,
    places_branches,
    plan_outside_branches,
    sums_gradients,
    synchronized_step_s,
)
from meshwright.simulator.tensor.split_profile import split_profile
from meshwright.simulator.tensor.standalone_splits import with_standalone_splits


@dataclass(frozen=True)
class StepTime:
    """The predicted time of a step. `breakdown` has the seconds that add up to `step_s`. `timeline` is None without a
    pipeline. `passes_s` are the seconds of the forward and the backward pass of a microbatch on the first stage."""

    step_s: float
    breakdown: dict[str, float]
    timeline: Timeline | None = None
    passes_s: tuple[float, float] = (0.0, 0.0)


def predict_step(
    cluster: Cluster,
    profile: ModelProfile,
    plan: Plan,
    batch: float,
    optimizer: OptimizerCost,
    runtime: Runtime = OUR_RUNTIME,
    nodes: Sequence[Node] = (),
    shard_part: float | None = None,
) -> StepTime:
    """The time of a step in which every microbatch of a rank has `batch` samples. `nodes` are those of the pipeline
    ranks if they are not alike; otherwise all ranks have the slowest device of the cluster. `shard_part` is the part
    that the rank holds of what the shard axis divides; None: as much as the rank that holds most."""
    slowest = slowest_node(nodes or cluster.nodes, plan)
    device, speeds, _ = rank_device(slowest, plan, runtime)
    optimizer = optimizer.fused() if plan.compute.fused_optimizer else optimizer
    context = context_exchange(cluster, profile.structure, plan)
    rank_plan, rank_batch = without_context(plan), batch / plan.axes.context
    inputs = StepInputs(cluster, rank_plan, rank_batch, optimizer, runtime, device, speeds, context=context)
    inputs = replace(inputs, shard_part=rank_plan.shard_part() if shard_part is None else shard_part)
    if nodes and groups_are_alike(plan.axes, cluster):
        inputs = replace(inputs, links=_only(slowest, cluster))
    if any(node is not nodes[0] for node in nodes):
        devices = {id(node): rank_device(node, plan, runtime) for node in nodes}
        if inputs.links is not None:
            devices = {id(node): devices[id(node)]._replace(links=_only(node, cluster)) for node in nodes}
        inputs = replace(inputs, stage_devices=tuple(devices[id(node)] for node in nodes))
    if casts_weights(plan):
        profile = without_weight_casts(profile)
    compiled = compiled_profile(chunked_profile(profile, plan.compute.loss_chunks), plan, rank_batch)
    executed = runtime.executed_profile(with_standalone_splits(compiled, plan))
    if places_branches(plan):
        return _step_with_branches(executed, inputs)
    return _step_of_equal_ranks(executed, inputs)[0]


def _only(node: Node, cluster: Cluster) -> Cluster:
    """The cluster with this kind of node alone."""
    return cluster.model_copy(update={"nodes": (node,)})


def _step_of_equal_ranks(profile: ModelProfile, inputs: StepInputs) -> tuple[StepTime, list[StageTime]]:
    """The time of a step in which all ranks of the tensor axis have equal shares of the model, and the time of one
    microbatch on each stage."""
    plan, runtime = inputs.plan, inputs.runtime
    whole_stages = stage_profiles(profile, plan.pipeline.cuts)
    local_profile = divided_profile(split_profile(profile, plan), plan)
    if plan.numerics.precision == "fp8":
        local_profile = runtime.float8_profile(local_profile)
    rank_stages = stage_profiles(runtime.padded_profile(local_profile), plan.pipeline.cuts)
    times = stage_times(whole_stages, rank_stages, inputs)
    passes = passes_time(times, rank_stages, inputs)
    tied_s = tied_gradients_s(rank_stages, plan, inputs.cluster, runtime)
    ends = [
        step_end(rank, times, rank_stages, inputs.on_rank(rank), passes.slack_s[rank], tied_s[rank])
        for rank in range(plan.axes.pipeline)
    ]
    end = max(ends, key=lambda end: end.total_s)
    breakdown = {
        **passes.breakdown,
        "pipeline": end.tied_s + passes.breakdown["pipeline"],
        "replicate": end.replicate_s,
        "shard": end.shard_s + passes.breakdown["shard"],
        "optimizer": end.optimizer_s,
        "input": 0.0,
        **({"offload": end.offload_s} if end.offload_s else {}),
    }
    passes_s = (times[0].forward_pass_s, times[0].backward_pass_s)
    return StepTime(sum(breakdown.values()), breakdown, passes.timeline, passes_s), times


def _step_with_branches(profile: ModelProfile, inputs: StepInputs) -> StepTime:
    """The time of a step in which ranks hold different branches. Each rank's step is predicted as if the rank were
    alone; the bubble is the time that the slowest of them waits for other ranks."""
    messages = tuple(branch_messages(profile, inputs.plan, inputs.batch))
    rank_inputs = replace(inputs, plan=plan_outside_branches(profile, inputs.plan), branch_messages=messages)
    microbatches = inputs.plan.microbatches
    steps = [_step_of_equal_ranks(local, rank_inputs) for local in branch_rank_profiles(profile, inputs.plan)]
    work = [
        RankWork(
            time.forward_pass_s,
            time.backward_pass_s,
            step.step_s - microbatches * (time.forward_pass_s + time.backward_pass_s),
        )
        for step, (time,) in steps
    ]
    longest = max((step for step, _ in steps), key=lambda step: step.step_s)
    step_s = synchronized_step_s(work, microbatches, summed=sums_gradients(messages))
    breakdown = {**longest.breakdown, "bubble": max(0.0, step_s - longest.step_s)}
    return StepTime(step_s, breakdown, passes_s=longest.passes_s)

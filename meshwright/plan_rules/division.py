"""Rules about what divides a model and its data: axes, modules, pipelines and shares."""

from meshwright.numbers.limits import MOST_DEVICES
from meshwright.plan_rules.rule import Rule

_PLAN = ("plan",)
_GIVEN_SHARES = (
    "{'shares.samples is [' + describe(shares.samples) + ']' if shares.samples else 'shares.adaptive is true'}"
)
_EXPERTS_WITH = "plan.axes.expert is {axes.expert}, but plan.%s, and they do not go together"

_AXES = (
    Rule(
        "data_ranks % axes.expert",
        "axes.expert is {axes.expert}, which does not divide replicate({axes.replicate}) × shard({axes.shard}) ="
        " {data_ranks} ranks, over which experts are divided",
        "choose a divisor of {data_ranks}",
        _PLAN,
    ),
    Rule(
        f"world_size > {MOST_DEVICES}",
        "axes: {product(axes)} = {format(world_size, ',')} ranks",
        f"at most {MOST_DEVICES:,}",
        _PLAN,
    ),
    Rule(
        "axes.expert > 1 and axes.shard > 1 and axes.shard % axes.expert",
        "plan.axes.expert is {axes.expert} and plan.axes.shard is {axes.shard}: next to a shard axis, experts are"
        " divided over its ranks, so axes.expert has to divide axes.shard",
        "choose a divisor of {axes.shard}, or set axes.shard to {axes.expert * max(1, axes.shard // axes.expert)}",
    ),
    *(
        Rule(f"axes.expert > 1 and {when}", _EXPERTS_WITH % what, f"{instead}, or set axes.expert to 1")
        for when, what, instead in (
            (
                "axes.pipeline > 1 and pipeline.schedule in ('zero_bubble', 'zbv')",
                "pipeline.schedule is {pipeline.schedule}, which runs the backward pass in two parts",
                "choose gpipe, 1f1b or interleaved_1f1b",
            ),
            ("over_replicate", "modules.splits splits a layer over the replicate axis", "remove the split"),
            (
                "memory.offload == 'parameters'",
                "memory.offload is parameters",
                "set memory.offload to optimizer or none",
            ),
            ("numerics.cast == 'weights'", "numerics.cast is weights", "set numerics.cast to operators"),
            ("numerics.precision == 'fp8'", "numerics.precision is fp8", "choose bf16"),
            ("compute.cuda_graphs", "compute.cuda_graphs is true", "set compute.cuda_graphs to false"),
            (
                "compute.fused_optimizer and axes.shard > 1",
                "axes.shard is {axes.shard} and compute.fused_optimizer is true, whose kernels do not update weights"
                " of different meshes together",
                "set compute.fused_optimizer to false",
            ),
        )
    ),
    Rule(
        "axes.context > 1 and placed",
        "plan.axes.context is {axes.context}, and plan.modules.branches places parts of the model on ranks, which"
        " cannot be executed together",
        "set axes.context to 1, or remove the branches",
    ),
    Rule(
        "axes.context > 1 and numerics.precision == 'fp8'",
        "plan.axes.context is {axes.context} and plan.numerics.precision is fp8, which cannot be executed together",
        "set axes.context to 1, or choose bf16",
    ),
)

_MODULES = (
    Rule(
        "any(rank >= axes.tensor for rank in modules.branches.values())",
        "modules.branches.{next(name for name, rank in modules.branches.items() if rank >= axes.tensor)} is"
        " {next(rank for rank in modules.branches.values() if rank >= axes.tensor)}, but the tensor axis has"
        " {axes.tensor} ranks, numbered from 0",
        "raise axes.tensor or choose a rank below it",
        _PLAN,
    ),
    Rule(
        "over_replicate and has_other_axes",
        "plan.modules.splits.{over_replicate[0]} splits a layer over the replicate axis, which needs all other axes to"
        " be 1, but the plan is {plan.summary()}",
        "remove the split, or set the other axes to 1",
    ),
    Rule(
        "over_replicate and axes.replicate == 1",
        "plan.modules.splits.{over_replicate[0]} is split over the replicate axis, but plan.axes.replicate is 1",
        "set axes.replicate to 2 or more, or remove the split",
    ),
    Rule(
        "axes.pipeline > 1 and placed",
        "plan.modules.branches.{next(iter(modules.branches))} is placed on one rank of the tensor axis, which a"
        " pipeline does not support, but the plan is {plan.summary()}",
        "remove the branches, or set axes.pipeline to 1",
    ),
)

_PIPELINES = (
    Rule(
        "stages > 1 and stages % axes.pipeline",
        "pipeline.cuts: {count(stages - 1, 'cut')} make {stages} stages, which {axes.pipeline} pipeline ranks do not"
        " divide",
        "choose cuts that make {axes.pipeline} stages, or a multiple of that",
        _PLAN,
    ),
    Rule(
        "stages > 1 and stages != axes.pipeline * STAGES_PER_RANK.get(pipeline.schedule, stages // axes.pipeline)",
        "pipeline.schedule: {pipeline.schedule} runs {count(STAGES_PER_RANK[pipeline.schedule], 'stage')} per rank, but"
        " {count(stages - 1, 'cut')} make {stages} stages for {count(axes.pipeline, 'rank')}",
        "choose cuts that make {STAGES_PER_RANK[pipeline.schedule] * axes.pipeline} stages",
        _PLAN,
    ),
    Rule(
        "axes.pipeline == 1 and pipeline.cuts",
        "plan.pipeline has {count(stages - 1, 'cut')}, but plan.axes.pipeline is 1",
        "set it to the number of ranks that share the stages, or leave the cuts out",
    ),
    Rule(
        "axes.pipeline == 1 and pipeline.microbatches > 1",
        "pipeline.microbatches is fixed to {pipeline.microbatches}, but there is no pipeline (axes.pipeline is 1)",
        "leave out one",
        ("fix",),
    ),
    Rule(
        "pipeline.cuts and pipeline.schedule == '1f1b' and pipeline.microbatches < axes.pipeline",
        "plan.pipeline.microbatches is {pipeline.microbatches}, but 1f1b needs as many as ranks",
        "choose at least {axes.pipeline}, or gpipe",
    ),
    Rule(
        "pipeline.cuts and pipeline.schedule in ('interleaved_1f1b', 'zero_bubble') and axes.pipeline > 1"
        " and pipeline.microbatches % max(1, pipeline.microbatches // axes.pipeline)",
        "plan.pipeline.microbatches is {pipeline.microbatches}, which {pipeline.schedule} cannot run in"
        " {pipeline.microbatches // axes.pipeline} rounds on {axes.pipeline} ranks",
        "choose {pipeline.microbatches // axes.pipeline * axes.pipeline} or"
        " {(pipeline.microbatches // axes.pipeline + 1) * axes.pipeline}",
    ),
)

_SHARES = (
    Rule(
        "shares.samples and len(shares.samples) != data_ranks",
        "shares.samples has {count(len(shares.samples), 'number')}, but replicate({axes.replicate}) ×"
        " shard({axes.shard}) = {data_ranks} {'rank trains' if data_ranks == 1 else 'ranks train'} on different"
        " samples",
        "give one number for each of them, or leave shares out for even shares",
        _PLAN,
    ),
    Rule(
        "(shares.samples or shares.adaptive) and gradients.local_steps > 1",
        f"{_GIVEN_SHARES}, but gradients.local_steps is {{gradients.local_steps}}: ranks that take steps alone have the"
        " same weight when their weights are averaged",
        "leave out shares, or set gradients.local_steps to 1",
        _PLAN,
    ),
    Rule(
        "(shares.samples or shares.adaptive) and gradients.updates != 'synchronous'",
        f"{_GIVEN_SHARES}, but gradients.updates is {{gradients.updates}}: a worker that does not wait for the others"
        " needs no share that fits its speed",
        "leave out shares, or set gradients.updates to synchronous",
        _PLAN,
    ),
    Rule(
        "shares.adaptive and gradients.servers",
        "shares.adaptive is true, but gradients.servers is {gradients.servers}: workers of parameter servers do not"
        " exchange how fast they are",
        "set shares.adaptive to false, or gradients.servers to 0",
        _PLAN,
    ),
    Rule(
        "device == 'cuda' and shares.adaptive and data_ranks > 1 and"
        " (has_other_axes or axes.expert > 1 or numerics.batch_norm == 'synchronized')",
        "plan.shares.adaptive is true, but GPUs exchange data in the forward pass of the plan ({plan.summary()}), so"
        " that the time of each rank alone is not seen",
        "give shares.samples instead, or a plan with the replicate axis only and local BatchNorm",
    ),
    Rule(
        "shares.adaptive and partition == 'sample'",
        "plan.shares.adaptive is true, but data.partition is sample: parts of the data set stay on their ranks, so"
        " shares cannot move",
        "set data.partition to batch, or shares.adaptive to false",
    ),
    Rule(
        "shares.shards and (axes.shard == 1 or len(shares.shards) != axes.shard)",
        "shares.shards is [{describe(shares.shards)}], {count(len(shares.shards), 'number')}, but axes.shard is"
        " {axes.shard}",
        "{'give one number for each rank of the shard axis' if axes.shard > 1 else 'set it above 1'}, or leave"
        " shares.shards out",
        _PLAN,
    ),
    *(
        Rule(
            f"shares.shards and {field} {refused}",
            f"shares.shards is [{{describe(shares.shards)}}], but {field} is {{{field}}}, with which shards are divided"
            " evenly only",
            f"set {field} to {needed}, or leave shares.shards out",
            _PLAN,
        )
        for field, refused, needed in (
            ("axes.context", "> 1", "1"),
            ("axes.expert", "> 1", "1"),
            ("memory.offload", "!= 'none'", "none"),
            ("numerics.precision", "== 'fp8'", "bf16"),
        )
    ),
)

DIVISION = (*_AXES, *_MODULES, *_PIPELINES, *_SHARES)

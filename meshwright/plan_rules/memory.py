"""Rules about precisions, and about what is kept in CPU memory."""

from meshwright.plan_rules.rule import Rule

MEMORY = (
    Rule(
        "numerics.precision == 'auto'",
        "plan.numerics.precision is auto, which only `meshwright train` resolves, and only if no launcher such as"
        " torchrun started it",
        "name fp32, tf32, bf16, fp16 or fp8",
    ),
    Rule(
        "numerics.cast == 'weights' and (axes.shard == 1 or numerics.precision not in ('bf16', 'fp16'))",
        "plan.numerics.cast is weights, which needs axes.shard > 1 and numerics.precision bf16 or fp16, but axes.shard"
        " is {axes.shard} and numerics.precision is {numerics.precision}",
        "change these, or set numerics.cast to operators",
    ),
    Rule(
        "numerics.precision == 'fp8' and (axes.tensor > 1 or axes.pipeline > 1)",
        "plan.numerics.precision is fp8, which works only with the replicate and shard axes, but the plan is"
        " {plan.summary()}",
        "set axes.tensor and axes.pipeline to 1, or choose bf16",
    ),
    Rule(
        "device == 'cpu' and memory.offload != 'none'",
        "memory.offload is fixed to {memory.offload}, but {cluster} has no GPUs whose tensors could be kept in CPU"
        " memory",
        "leave it out",
        ("fix",),
    ),
    Rule(
        "memory.offload == 'parameters' and (axes.shard == 1 or memory.sharding != 'parameters')",
        "plan.memory.offload is parameters, which keeps the shards of parameters in CPU memory and needs axes.shard > 1"
        " and memory.sharding parameters, but axes.shard is {axes.shard} and memory.sharding is {memory.sharding}",
        "change these, or set memory.offload to optimizer",
    ),
    Rule(
        "memory.offload != 'none' and compute.cuda_graphs",
        "plan.memory.offload is {memory.offload}, which copies tensors between the GPU and CPU memory in every step,"
        " but compute.cuda_graphs is true, which repeats work on the GPU only",
        "set one of them to its default",
    ),
    Rule(
        "memory.offload != 'none' and gradients.servers",
        "plan.memory.offload is {memory.offload}, but gradients.servers is {gradients.servers}, and servers hold the"
        " optimizer in their own CPU memory",
        "set memory.offload to none",
    ),
)

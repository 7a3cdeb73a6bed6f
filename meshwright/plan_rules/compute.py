"""Rules about how ranks run their operators, and about what is compiled."""

from meshwright.plan_rules.rule import Rule

COMPUTE = (
    Rule(
        "compute.cuda_graphs and compute.compile == 'none' and world_size > 1",
        "plan.compute.cuda_graphs needs a single rank, or compiled blocks (compute.compile), but the plan is"
        " {plan.summary()}",
        "set compute.cuda_graphs to false, or set compute.compile to blocks",
    ),
    Rule(
        "compute.cuda_graphs and (axes.tensor > 1 or axes.pipeline > 1)",
        "plan.compute.cuda_graphs works only with the replicate and shard axes, but the plan is {plan.summary()}",
        "set compute.cuda_graphs to false, or set axes.tensor and axes.pipeline to 1",
    ),
    *(
        Rule(
            f"compute.loss_chunks > 1 and {when}",
            f"plan.compute.loss_chunks is {{compute.loss_chunks}}, which does not work with {what}, but the plan is"
            " {plan.summary()}",
            "set compute.loss_chunks to 1, or change the other choice",
        )
        for when, what in (
            ("(axes.tensor > 1 or modules.splits)", "layers that are split or placed on ranks"),
            ("axes.pipeline > 1", "a pipeline"),
            ("axes.context > 1", "sequences that are divided over the context axis"),
            ("numerics.precision == 'fp8'", "numerics.precision fp8"),
        )
    ),
    *(
        Rule(
            f"compute.convolutions == 'nnpack' and {field} != '{needed}'",
            "plan.compute.convolutions is nnpack, whose kernels take contiguous images and are not used in compiled"
            f" code, but {field} is {{{field}}}",
            f"set it to {needed}, or compute.convolutions to default",
        )
        for field, needed in (("compute.layout", "contiguous"), ("compute.compile", "none"))
    ),
    Rule(
        "device == 'cuda' and compute.convolutions == 'nnpack'",
        "compute.convolutions is fixed to nnpack, whose kernels are for CPUs, but {cluster} has GPUs",
        "leave it out",
        ("fix",),
    ),
)

COMPILED = tuple(
    Rule(when, why, where=("compile",))
    for when, why in (
        ("axes.expert > 1", "models whose experts are divided over ranks are not compiled"),
        ("over_replicate", "layers that are split over the replicate axis are not compiled"),
        ("axes.context > 1", "models whose sequences are divided over the context axis are not compiled"),
        ("placed", "models whose branches are placed on ranks are not compiled"),
        (
            "axes.tensor > 1 and memory.recompute == 'selective'",
            "split layers that are recomputed selectively are not compiled",
        ),
    )
)

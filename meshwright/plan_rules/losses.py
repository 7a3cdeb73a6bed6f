"""Rules about losses that compare the samples or tokens of a whole global batch, and about proofs."""

from meshwright.plan_rules.rule import Rule

_CUTS = "but the plan ({plan.summary()}) cuts a rank's share of it into {microbatches} microbatches"
_ROUTERS = "the model adds a load-balancing loss of its routers, which compares all tokens of a global batch"
_NO_ROUTER_LOSS = "output_router_logits of the model's configuration to false"

LOSSES = (
    Rule(
        "not loss.is_divisible and data_ranks * microbatches > 1",
        "the loss that the model computes is neither a mean nor a sum over samples or targets: it compares samples with"
        " each other, or adds means over different numbers of targets. So it cannot be divided among the {data_ranks}"
        " data ranks × {microbatches} microbatches of the plan ({plan.summary()})",
        "compute it in a loss function from the model's output, or use a plan without data parallelism and"
        " microbatches",
    ),
    Rule(
        "routers and microbatches > 1",
        f"{_ROUTERS}, {_CUTS}",
        f"set memory.accumulation and pipeline.microbatches to 1, or {_NO_ROUTER_LOSS}",
    ),
    Rule(
        "routers and gradients.servers and data_ranks > 1",
        f"{_ROUTERS}, but workers of parameter servers do not exchange them",
        f"set gradients.servers to 0, or {_NO_ROUTER_LOSS}",
    ),
    *(
        Rule(f"loss.kind == '{kind}' and {when}", f"{compares}, {but}", instead)
        for kind, compares in (
            ("compares_samples", "the loss compares all samples of a global batch with each other"),
            ("terms", "the losses of this detector are means over the boxes of a whole global batch"),
        )
        for when, but, instead in (
            ("microbatches > 1", _CUTS, "set memory.accumulation and pipeline.microbatches to 1"),
            (
                "gradients.servers",
                "but workers of parameter servers do not exchange samples or numbers of boxes",
                "set gradients.servers to 0",
            ),
        )
    ),
    Rule(
        "gradients.updates != 'synchronous'",
        "gradients.updates is {gradients.updates}: workers then train on weights of different ages, which no single"
        " device does",
        "prove takes synchronous ones, so set it to synchronous",
        ("prove",),
    ),
)

"""Rules about who runs a plan: a session, a loop with its own backward pass, a library's trainer, another program."""

from meshwright.plan_rules.rule import Rule

_OWN_LOOPS = ("own loop", "Lightning", "transformers")
_REPLICAS_AND_SHARDS = "choose a plan of replicas and shards"

DOORS = (
    # A library reads the plan that it was given: `caller` is its class.
    Rule(
        "shares.adaptive",
        "{caller}: the plan ({plan.summary()}) has adaptive shares, which need the measurements of session.step, and"
        " this loop makes its own steps",
        "set shares.adaptive to false and give shares.samples, or train with mw.parallelize or `meshwright train`",
        ("library",),
    ),
    Rule(
        "shares.shards",
        "{caller}: the plan ({plan.summary()}) has shares.shards, which this loop does not know",
        "leave shares.shards out, or train with mw.parallelize or `meshwright train`",
        ("library",),
    ),
    *(
        Rule(when, why, instead, (where,))
        for where, instead in (
            ("Accelerate", _REPLICAS_AND_SHARDS),
            (
                "Lightning",
                "define the hook session(self, plan) that returns mw.parallelize(…) of the part that is the model, or"
                f" {_REPLICAS_AND_SHARDS}",
            ),
        )
        for when, why in (
            *(
                (f"{axis} > 1", f"{axis} is {{{axis}}}")
                for axis in ("axes.context", "axes.tensor", "axes.pipeline", "axes.expert")
            ),
            ("modules.splits or modules.branches", "it divides layers"),
        )
    ),
    Rule(
        "axes.pipeline > 1",
        "a pipeline needs session.step, and Trainer makes its steps itself",
        "choose other axes",
        ("transformers",),
    ),
    Rule(
        "gradients.servers",
        "only `meshwright train` starts parameter servers",
        "set gradients.servers to 0",
        ("Accelerate", "Lightning", "transformers"),
    ),
    *(
        Rule(
            "gradients.servers", f"the plan ({{plan.summary()}}) has parameter servers, which {why}", instead, (where,)
        )
        for where, why, instead in (
            ("session", "only `meshwright train` starts", "use that command, or set gradients.servers to 0"),
            ("export", "no other program has", "set gradients.servers to 0"),
            (
                "launch files",
                "`meshwright train` starts only by itself, on one machine",
                "set gradients.servers to 0",
            ),
            (
                "launched ranks",
                "`meshwright train` starts only if no launcher such as torchrun started it",
                "run it without a launcher",
            ),
        )
    ),
    Rule(
        "axes.context > 1",
        "axes.context is {axes.context}",
        "choose a plan that divides no sequences, or use mw.parallelize",
        ("transformers",),
    ),
    Rule(
        "shares.shards",
        "shares.shards gives ranks unequal shards, which checkpoints of other libraries do not know",
        "leave it out",
        ("Accelerate", "transformers"),
    ),
    Rule(
        "axes.pipeline > 1",
        "a pipeline runs forward and backward passes of microbatches in turns, call session.step(batch) instead",
        where=("own loop",),
    ),
    *(
        Rule("memory.accumulation > 1", "memory.accumulation is {memory.accumulation}" + which, instead, (where,))
        for where, which, instead in (
            (
                "own loop",
                ", which session.step does",
                "call it instead, or set accumulation to 1 and accumulate in your loop with session.no_sync()",
            ),
            ("Accelerate", "", "set it to 1, and accumulate with Accelerator(gradient_accumulation_steps=…)"),
            ("Lightning", "", "set it to 1, and accumulate with Trainer(accumulate_grad_batches=…)"),
            ("transformers", "", "set it to 1, and give gradient_accumulation_steps to TrainingArguments"),
        )
    ),
    Rule(
        "modules.branches",
        "its branches are weights of one rank only, which checkpoints of transformers cannot hold",
        "leave them out",
        ("transformers",),
    ),
    Rule(
        "numerics.precision in ('fp8', 'auto')",
        "numerics.precision is {numerics.precision}",
        "choose fp32, tf32 or bf16",
        ("transformers",),
    ),
    Rule(
        "memory.recompute != 'none' and arguments.gradient_checkpointing",
        "it recomputes activations (memory.recompute: {memory.recompute}), as gradient_checkpointing does",
        where=("transformers",),
    ),
    Rule(
        "has_other_axes and getattr(arguments, 'predict_with_generate', False)",
        "predict_with_generate needs whole weights on every rank",
        "choose a plan with replicas only",
        ("transformers",),
    ),
    Rule(
        "axes.tensor > 1 and arguments.include_num_input_tokens_seen != 'no'",
        "include_num_input_tokens_seen would count tokens once for each tensor rank",
        "leave it out",
        ("transformers",),
    ),
    Rule(
        "gradients.local_steps > 1",
        "gradients.local_steps is for session.step",
        "call it instead, or set local_steps to 1",
        (*_OWN_LOOPS, "Accelerate"),
    ),
    Rule(
        "gradients.powersgd_rank",
        "gradients.powersgd_rank is for session.step",
        "call it instead, or set powersgd_rank to 0",
        (*_OWN_LOOPS, "Accelerate"),
    ),
    Rule(
        "numerics.precision == 'fp16'",
        "gradients in fp16 need the loss scale of session.step",
        "call it instead, or choose bf16 or fp32",
        _OWN_LOOPS,
    ),
    Rule(
        "numerics.precision == 'fp16' and axes.shard > 1",
        "numerics.precision is fp16 and weights are sharded",
        "choose bf16, or replicas",
        ("Accelerate",),
    ),
    Rule(
        "shares.adaptive",
        "shares.adaptive measures the steps of session.step",
        "call it instead, or set adaptive to false and give shares.samples",
        _OWN_LOOPS,
    ),
)

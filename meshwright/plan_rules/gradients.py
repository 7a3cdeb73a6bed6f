"""Rules about how gradients are combined. Parameter servers, local steps and PowerSGD each replace the all-reduce of
replicas, so a plan may choose only one of them, and only without other axes."""

from meshwright.plan_rules.rule import Rule

_PLAN = ("plan",)
_REPLACED = "gradients.{replaces_all_reduce[0]}"

GRADIENTS = (
    Rule(
        "replaces_all_reduce and (has_other_axes or axes.expert > 1)",
        f"{_REPLACED} is {{getattr(gradients, replaces_all_reduce[0])}}, which works with the replicate axis only, but"
        " the plan has other axes, too",
        "set their sizes to 1, or leave it out",
        _PLAN,
    ),
    Rule(
        "len(replaces_all_reduce) > 1",
        f"{_REPLACED} and gradients.{{replaces_all_reduce[1]}} exclude each other",
        "choose one",
        _PLAN,
    ),
    Rule(
        "replaces_all_reduce and gradients.precision != 'fp32'",
        f"{_REPLACED} determines the dtype that is sent, but gradients.precision is {{gradients.precision}}",
        "set gradients.precision to fp32",
        _PLAN,
    ),
    # An error, because the algorithm would have no effect.
    Rule(
        "gradients.algorithm not in ('auto', 'native') and (replaces_all_reduce or axes.shard > 1)",
        "gradients.algorithm is {gradients.algorithm}, which combines the gradients of replicas, but"
        " {'gradients.' + replaces_all_reduce[0] if replaces_all_reduce else 'axes.shard (%s)' % axes.shard} combines"
        " them in another way",
        "set gradients.algorithm to auto",
        _PLAN,
    ),
    Rule(
        "gradients.updates != 'synchronous' and not gradients.servers",
        "gradients.updates is {gradients.updates}, which needs parameter servers",
        "set gradients.servers to 1 or more",
        _PLAN,
    ),
    Rule(
        "device == 'cuda' and gradients.algorithm not in ('auto', 'native')",
        "gradients.algorithm is {gradients.algorithm}, which combines gradients of CPU ranks, but {cluster} has GPUs",
        "choose native",
    ),
    # Workers communicate with the servers only.
    Rule(
        "gradients.servers and numerics.batch_norm == 'synchronized'",
        "plan.numerics.batch_norm is synchronized, for which workers would have to wait for each other in every layer,"
        " but gradients.servers is {gradients.servers}",
        "set numerics.batch_norm to local, or gradients.servers to 0",
    ),
    Rule(
        "gradients.servers and compute.cuda_graphs and compute.compile == 'none'",
        "plan.compute.cuda_graphs captures whole steps unless blocks are compiled, and such a CUDA graph cannot include"
        " the communication with parameter servers, but gradients.servers is {gradients.servers}",
        "set compute.cuda_graphs to false, compute.compile to blocks, or gradients.servers to 0",
    ),
    Rule(
        "gradients.servers and modules.splits",
        "plan.modules.splits.{next(iter(modules.splits))} divides a layer among ranks, which then have to communicate"
        " with each other, but gradients.servers is {gradients.servers} and workers communicate with the servers only",
        "remove the split, or set gradients.servers to 0",
    ),
    Rule(
        "gradients.servers and train.on_nonfinite == 'rewind'",
        "train.on_nonfinite is rewind, but workers of parameter servers cannot go back to a checkpoint, and"
        " gradients.servers is {gradients.servers}",
        "set train.on_nonfinite to skip or stop, or gradients.servers to 0",
    ),
    Rule(
        "gradients.servers and train.on_spike != 'ignore'",
        "train.on_spike is {train.on_spike}, but workers of parameter servers do not know each other's losses, and"
        " gradients.servers is {gradients.servers}",
        "leave out train.on_spike, or set gradients.servers to 0",
    ),
    Rule(
        "gradients.servers and not checkpoint.frozen",
        "checkpoint.frozen is false, but parameter servers save all weights, and gradients.servers is"
        " {gradients.servers}",
        "leave out checkpoint.frozen, or set gradients.servers to 0",
    ),
)

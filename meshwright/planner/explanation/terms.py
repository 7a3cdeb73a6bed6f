"""The terms of a predicted step, in words."""

from meshwright.plan import Plan

COMMUNICATION = ("context", "tensor", "pipeline", "replicate", "shard", "expert")
TERMS = {
    "compute": "computing",
    "launch": "starting operators",
    "bubble": "waiting in the pipeline bubble",
    "optimizer": "the optimizer's step",
    "input": "reading input",
    "offload": "copying weights and gradients from and to CPU memory",
    "context": "exchanging keys and values",
    "tensor": "communication of split layers",
    "pipeline": "sending between stages",
    "replicate": "combining gradients of replicas",
    "shard": "gathering weights and combining gradients of shards",
    "expert": "sending tokens to experts and back",
}
_TERMS_WITH_BRANCHES = {
    "bubble": "waiting for the branches of other ranks",
    "tensor": "sending results and gradients between branches",
}


def term_words(plan: Plan, name: str) -> str:
    """What a term of a prediction is, in words."""
    if plan.modules.branches and name in _TERMS_WITH_BRANCHES:
        return _TERMS_WITH_BRANCHES[name]
    return TERMS[name]

"""The share of each global batch that every data rank gets in a proof.

Adaptive shares depend on measured times. In a proof they follow a fixed pattern instead, which the one-device reference
knows: in every step some samples move from one rank to the next one. So the proof has as many changes as steps.
"""

from meshwright.data.batch import SampleShare
from meshwright.data.share_table import ShareTable
from meshwright.plan import Plan
from meshwright.train.shares.adaptive import ShareDecision

_STEPS = 60  # of the pattern; a proof makes fewer


def rank_shares(plan: Plan, global_batch: int) -> list[SampleShare]:
    """The shares of all data ranks."""
    ranks, samples, changes = plan.data_ranks, plan.shares.samples, None
    if plan.shares.adaptive and ranks > 1:
        changes = ShareTable(samples or (1,) * ranks)
        for decision in moving_shares(plan, global_batch):
            assert decision.first is not None
            changes.add(decision.first, decision.samples)
    return [SampleShare(rank, ranks, samples=samples, changes=changes) for rank in range(ranks)]


def moving_shares(plan: Plan, global_batch: int) -> list[ShareDecision]:
    """The changes of a proof of adaptive shares, one for each batch but the first. In batch k, rank k % ranks gives a
    third of its first share, but no sample that one of its microbatches needs, to the next rank."""
    sizes, decisions = plan.share_sizes(global_batch), []
    for batch in range(1, _STEPS):
        giver, taker = batch % len(sizes), (batch + 1) % len(sizes)
        moved = max(0, min(-(-sizes[giver] // 3), sizes[giver] - plan.microbatches))
        samples = list(sizes)
        samples[giver] -= moved
        samples[taker] += moved
        decisions.append(ShareDecision(_STEPS, batch, tuple(samples), ()))
    return decisions

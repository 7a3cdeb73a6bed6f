"""The causes `unweighted_shares` and `uneven_targets`: a mean of means was taken although ranks (or microbatches) have
different numbers of targets, so targets have uneven weights. The first one is that of a plan whose shares are unequal:

    right         Σ over ranks of (sum over the rank's targets) / targets of all ranks
    unweighted    Σ over ranks of (mean over the rank's targets) / ranks
"""

from collections.abc import Collection

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, weighted_sum
from meshwright.proof.reference.experiments import RankContribution, add_scaled


def unweighted_shares(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the plan gives ranks unequal shares, and one device gets the ranks' gradients (or their
    loss, if only that differs) when it weights all ranks, or one of them, as if shares were even."""
    contributions = evidence.experiments.rank_contributions
    only_loss = evidence.difference.what == "loss" and not evidence.differing_names
    shares = evidence.plan.shares
    if not (shares.samples or shares.adaptive) or not contributions or not (evidence.gradients_differ or only_loss):
        return None
    every_rank = tuple(range(len(contributions)))
    fitting = []
    for ranks in (every_rank, *((rank,) for rank in every_rank)):
        gradients, loss = _unweighted(contributions, ranks)
        misfit = evidence.loss_error(loss) if only_loss else evidence.misfit(gradients)
        if evidence.fits(misfit) and evidence.is_distinguishable(gradients):
            fitting.append((misfit, ranks))
    if not fitting:
        return None
    misfit, ranks = min(fitting)
    samples = ", ".join(str(contribution.samples) for contribution in contributions[:8])
    subject = "the losses of" if only_loss else "the gradients of"
    which = "all data ranks" if ranks == every_rank else f"data rank {ranks[0]}"
    return Verdict(
        "unweighted_shares",
        f"{subject} {which} are averaged with the weight of an even share, 1/{len(contributions)}, but the data ranks"
        f" have {samples} samples of this batch",
        misfit,
    )


def _unweighted(contributions: list[RankContribution], ranks: Collection[int]) -> tuple[Tensors, float]:
    """Returns the gradients and the loss if these ranks have the weight of an even share, and the others that of their
    targets."""
    total = sum(contribution.target_count for contribution in contributions) or 1.0
    gradients: Tensors = {}
    loss = 0.0
    for rank, contribution in enumerate(contributions):
        own = contribution.target_count * len(contributions)
        weight = (1 / own if own else 0.0) if rank in ranks else 1 / total
        gradients = add_scaled(gradients, contribution.gradient_sums, weight)
        loss += contribution.loss_sum * weight
    return gradients, loss


def uneven_targets(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients (or their loss, if only that differs) when it averages
    the means of data ranks, or the means of microbatches, with equal weights or weighted by their numbers of
    samples."""
    contributions = evidence.experiments.rank_contributions
    only_loss = evidence.difference.what == "loss" and not evidence.differing_names
    if not contributions or not (evidence.gradients_differ or only_loss):
        return None
    fitting = []
    right = weighted_mean(contributions)
    for rule, (gradients, loss) in _rules(contributions).items():
        misfit = evidence.loss_error(loss) if only_loss else evidence.misfit(gradients)
        is_uneven = not evidence.fits(
            evidence.misfit(right, gradients=gradients)
        )  # else the numbers of targets are even
        if is_uneven and evidence.fits(misfit) and evidence.is_distinguishable(gradients):
            fitting.append((misfit, rule))
    if not fitting:
        return None
    misfit, rule = min(fitting)
    counts = ", ".join(f"{contribution.target_count:g}" for contribution in contributions[:8])
    subject = "the loss is" if only_loss else "gradients are"
    return Verdict(
        "uneven_targets",
        f"{subject} the mean over {rule} of their own means, but these have different numbers of targets (data ranks:"
        f" {counts})",
        misfit,
    )


def weighted_mean(contributions: list[RankContribution]) -> Tensors:
    """Returns the gradients of the mean over all targets, where each part of the batch is computed by itself."""
    total = sum(contribution.target_count for contribution in contributions) or 1.0
    return weighted_sum((contribution.gradient_sums for contribution in contributions), 1 / total)


def _rules(contributions: list[RankContribution]) -> dict[str, tuple[Tensors, float]]:
    """Returns the gradients and the loss that each wrong mean gives, by a text that names the mean."""
    ranks = len(contributions)
    microbatches = sum(rank.microbatches for rank in contributions) or 1
    samples = sum(rank.samples for rank in contributions) or 1
    mean_weights = [1 / rank.target_count if rank.target_count else 0.0 for rank in contributions]
    means = [
        add_scaled({}, rank.gradient_sums, weight) for rank, weight in zip(contributions, mean_weights, strict=True)
    ]
    losses = [rank.loss_sum / rank.target_count if rank.target_count else 0.0 for rank in contributions]
    return {
        "data ranks": (weighted_sum(means, 1 / ranks), sum(losses) / ranks),
        "microbatches": (
            weighted_sum((rank.mean_gradients for rank in contributions), 1 / microbatches),
            sum(rank.mean_losses for rank in contributions) / microbatches,
        ),
        "microbatches, by their samples,": (
            weighted_sum((rank.sample_weighted_gradients for rank in contributions), 1 / samples),
            sum(rank.sample_weighted_losses for rank in contributions) / samples,
        ),
    }

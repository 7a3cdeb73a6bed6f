"""The cause `coupled_samples`: the loss compares samples with each other, but each rank compared only its own."""

from meshwright.proof.causes.evidence import Evidence, Verdict, weighted_sum


def coupled_samples(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when it computes the loss of each data rank's samples
    by themselves."""
    if not evidence.experiments.compares_samples or not evidence.gradients_differ:
        return None
    contributions = evidence.experiments.rank_contributions
    samples = sum(rank.samples for rank in contributions)
    if not samples:
        return None
    gradients = weighted_sum((rank.gradient_sums for rank in contributions), 1 / samples)
    misfit = evidence.misfit(gradients)
    if not evidence.fits(misfit) or not evidence.is_distinguishable(gradients):
        return None
    return Verdict(
        "coupled_samples",
        "the loss compares the samples of a batch with each other, and each data rank compared its own samples only",
        misfit,
    )

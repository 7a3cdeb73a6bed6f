"""The cause `coupled_samples`: the loss compares samples with each other, but each rank compared only its own. And the
cause `divided_batch`: what the model itself computes depends on how the batch is divided."""

from meshwright.proof.causes.evidence import Evidence, Verdict, weighted_sum
from meshwright.proof.causes.targets import weighted_mean


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


def divided_batch(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when it computes each data rank's microbatches one
    after the other, and weights their targets rightly."""
    experiments = evidence.experiments
    if experiments.compares_samples or not evidence.gradients_differ or not experiments.rank_contributions:
        return None
    gradients = weighted_mean(experiments.rank_contributions)
    misfit = evidence.misfit(gradients)
    if not evidence.fits(misfit) or not evidence.is_distinguishable(gradients):
        return None
    plan = evidence.plan
    passes = f"{plan.microbatches} microbatches" if plan.microbatches > 1 else f"{plan.data_ranks} data ranks"
    if experiments.forward_changes_state:
        return Verdict(
            "divided_batch",
            f"the forward pass changes state (a buffer or an attribute) that the next one reads: under this plan's"
            f" {passes} it runs for a part of the batch each time, on one device once in a step",
            misfit,
        )
    return Verdict(
        "divided_batch",
        f"what the model returns for a sample depends on the others that it gets: under this plan's {passes} these are"
        " not those of one device",
        misfit,
    )

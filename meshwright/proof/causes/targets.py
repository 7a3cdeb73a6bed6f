"""Targets weighted unevenly: a mean of means, where ranks or microbatches have different numbers of targets."""

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, mean_of
from meshwright.proof.reference.experiments import Brought, added


def uneven_targets(evidence: Evidence) -> Verdict | None:
    """What one device computes as a mean over data ranks, over microbatches or over samples of their own means is what
    the ranks have: gradients, or only the loss."""
    brought = evidence.lab.shares
    only_loss = evidence.first.what == "loss" and not evidence.wrong
    if not brought or not (evidence.gradients_are_wrong or only_loss):
        return None
    found = []
    for rule, (gradients, loss) in _rules(brought).items():
        misfit = evidence.loss_off(loss) if only_loss else evidence.misfit(gradients)
        if evidence.fits(misfit) and evidence.is_unusual(gradients):
            found.append((misfit, rule))
    if not found:
        return None
    misfit, rule = min(found)
    counts = ", ".join(f"{each.count:g}" for each in brought[:8])
    what = "the loss is" if only_loss else "gradients are"
    return Verdict(
        "uneven_targets",
        f"{what} the mean over {rule} of their own means, but these have different numbers of targets (data ranks:"
        f" {counts})",
        misfit,
    )


def _rules(brought: list[Brought]) -> dict[str, tuple[Tensors, float]]:
    ranks = len(brought)
    parts = sum(each.microbatches for each in brought) or 1
    samples = sum(each.samples for each in brought) or 1
    means = [added({}, each.gradients, 1 / each.count if each.count else 0.0) for each in brought]
    losses = [each.loss / each.count if each.count else 0.0 for each in brought]
    return {
        "data ranks": (mean_of(means, 1 / ranks), sum(losses) / ranks),
        "microbatches": (
            mean_of((each.means for each in brought), 1 / parts),
            sum(each.mean_losses for each in brought) / parts,
        ),
        "microbatches, by their samples,": (
            mean_of((each.by_samples for each in brought), 1 / samples),
            sum(each.losses_by_samples for each in brought) / samples,
        ),
    }

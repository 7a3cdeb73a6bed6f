"""The cause `local_clip`: gradients were clipped by a norm that is not the global one, but that of a rank's part of the
gradients, or of the gradients of a rank's own samples."""

import math

from meshwright.proof.causes.evidence import Evidence, Verdict, weighted_sum
from meshwright.proof.reference.experiments import Tensors, add_scaled

_CLIP_EPSILON = 1e-6  # torch adds it to the norm


def local_clip(evidence: Evidence) -> Verdict | None:
    """Returns a verdict in two cases. Either the gradients are right, but a rank clipped its part of them by the factor
    that follows from the norm of that part. Or the gradients are those that result if each data rank clips its own
    gradients before they are averaged."""
    if evidence.clip_norm is None:
        return None
    if evidence.gradients_differ:
        return _clipped_before_averaging(evidence, evidence.clip_norm)
    if evidence.difference.what in ("gradient norm", "weight"):
        return _clipped_by_part(evidence, evidence.clip_norm)
    return None


def _clipped_by_part(evidence: Evidence, limit: float) -> Verdict | None:
    global_norm = float(evidence.expected.norm)
    right = _clip_factor(global_norm, limit)
    worst, wrong = 0.0, []
    for observation in evidence.observations:
        if not observation.gradient_norm:
            continue
        factor = observation.clipped_norm / observation.gradient_norm
        if evidence.fits(abs(factor - right) / right):
            continue
        own_factor = _clip_factor(observation.gradient_norm, limit)
        worst = max(worst, abs(factor - own_factor) / own_factor)
        wrong.append((observation, factor))
    if not wrong or not evidence.fits(worst):
        return None
    observation, factor = wrong[0]
    norm = observation.gradient_norm
    return Verdict(
        "local_clip",
        f"rank {observation.rank} multiplied its gradients by {factor:.4g} = {limit:g} / {norm:.4g}, the norm of"
        f" its own part; the norm of all is {global_norm:.4g}, which makes {right:.4g}",
        worst,
    )


def _clipped_before_averaging(evidence: Evidence, limit: float) -> Verdict | None:
    contributions = evidence.experiments.rank_contributions
    ranks = len(contributions)
    count = sum(contribution.target_count for contribution in contributions)
    if ranks < 2 or not count:
        return None
    means: list[Tensors] = [add_scaled({}, rank.gradient_sums, ranks / count) for rank in contributions]
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in mean.values())) for mean in means]
    clipped = [add_scaled({}, mean, _clip_factor(norm, limit)) for mean, norm in zip(means, norms, strict=True)]
    candidate = weighted_sum(clipped, 1 / ranks)
    misfit = evidence.misfit(candidate)
    if not evidence.fits(misfit) or not evidence.is_distinguishable(candidate):
        return None
    first_norms = ", ".join(f"{norm:.4g}" for norm in norms[:4])
    return Verdict(
        "local_clip",
        f"each data rank's gradients were clipped to {limit:g} by their own norm ({first_norms}) before they were"
        f" averaged; the norm of the mean is {float(evidence.expected.norm):.4g}",
        misfit,
    )


def _clip_factor(norm: float, limit: float) -> float:
    return min(1.0, limit / (norm + _CLIP_EPSILON))

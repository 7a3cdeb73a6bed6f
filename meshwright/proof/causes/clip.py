"""A norm that ranks clip by themselves: of their own part of the gradients, or of their own samples' gradients."""

import math

from meshwright.proof.causes.evidence import Evidence, Verdict, mean_of
from meshwright.proof.reference.experiments import Tensors, added

_CLIP_EPSILON = 1e-6  # torch's own, beside the norm


def local_clip(evidence: Evidence) -> Verdict | None:
    """Gradients are right, but the factor by which a rank then shortened its part of them is that of the part's norm
    and not that of the whole one's. Or gradients are what comes of clipping each data rank's before they are averaged.
    """
    if evidence.clip_norm is None:
        return None
    if evidence.gradients_are_wrong:
        return _before_combining(evidence, evidence.clip_norm)
    if evidence.first.what in ("gradient norm", "weight"):
        return _own_parts(evidence, evidence.clip_norm)
    return None


def _own_parts(evidence: Evidence, limit: float) -> Verdict | None:
    right = _factor(float(evidence.expected.norm), limit)
    worst, clipped = 0.0, []
    for witness in evidence.seen:
        if not witness.norm:
            continue
        applied = witness.clipped / witness.norm
        if evidence.fits(abs(applied - right) / right):
            continue
        own = _factor(witness.norm, limit)
        worst = max(worst, abs(applied - own) / own)
        clipped.append((witness, applied))
    if not clipped or not evidence.fits(worst):
        return None
    witness, applied = clipped[0]
    return Verdict(
        "local_clip",
        f"rank {witness.rank} multiplied its gradients by {applied:.4g} = {limit:g} / {witness.norm:.4g}, the norm of"
        f" its own part; the norm of all is {float(evidence.expected.norm):.4g}, which makes {right:.4g}",
        worst,
    )


def _before_combining(evidence: Evidence, limit: float) -> Verdict | None:
    brought = evidence.lab.shares
    count = sum(each.count for each in brought)
    if len(brought) < 2 or not count:
        return None
    means: list[Tensors] = [added({}, each.gradients, len(brought) / count) for each in brought]
    norms = [math.sqrt(sum(float(g.double().square().sum()) for g in mean.values())) for mean in means]
    clipped = [added({}, mean, _factor(norm, limit)) for mean, norm in zip(means, norms, strict=True)]
    mean = mean_of(clipped, 1 / len(clipped))
    misfit = evidence.misfit(mean)
    if not evidence.fits(misfit) or not evidence.is_unusual(mean):
        return None
    told = ", ".join(f"{norm:.4g}" for norm in norms[:4])
    return Verdict(
        "local_clip",
        f"each data rank's gradients were clipped to {limit:g} by their own norm ({told}) before they were averaged;"
        f" the norm of the mean is {float(evidence.expected.norm):.4g}",
        misfit,
    )


def _factor(norm: float, limit: float) -> float:
    return min(1.0, limit / (norm + _CLIP_EPSILON))

"""`diagnose`: finds out why two recorded trainings differ, from the numbers alone. Each hypothesis is a function that
gets the evidence and returns a verdict, or None if it does not explain the difference."""

from collections.abc import Callable
from dataclasses import replace

from meshwright.audit.causes.clipping.clipped_apart import clipped_differently
from meshwright.audit.causes.clipping.each_microbatch import clipped_each_microbatch
from meshwright.audit.causes.clipping.norm_of_part import norm_of_part
from meshwright.audit.causes.clipping.not_seen import norm_not_seen
from meshwright.audit.causes.factors.counted_twice import counted_twice
from meshwright.audit.causes.factors.experts import expert_gradients
from meshwright.audit.causes.factors.own_tokens import averaged_over_own_tokens
from meshwright.audit.causes.factors.router import router_loss
from meshwright.audit.causes.factors.scaled import scaled
from meshwright.audit.causes.factors.tokens import averaged_over_ranks
from meshwright.audit.causes.places.not_reached import not_reached
from meshwright.audit.causes.places.part import describe, part
from meshwright.audit.causes.positions import positions_restart
from meshwright.audit.causes.reductions.missing_reduction import missing_reduction
from meshwright.audit.causes.reductions.part_of_sum import part_of_sum
from meshwright.audit.causes.reductions.precision import low_precision, not_finite
from meshwright.audit.causes.reductions.tied import tied_on_one_side
from meshwright.audit.causes.samples import other_samples
from meshwright.audit.causes.start import different_start
from meshwright.audit.causes.updates.buffers import scaled_buffers, stale_buffers, unsynchronized_buffers
from meshwright.audit.causes.updates.optimizer_state import not_updated, optimizer_state
from meshwright.audit.causes.updates.options import other_optimizer
from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import Evidence, Explained, Verdict

Hypothesis = Callable[[Evidence], Verdict | None]

# Causes that exist before anything is computed. If one of them holds, it explains all later differences, and `THEN` is
# not checked.
FIRST: tuple[Hypothesis, ...] = (different_start, other_samples)

# Of these causes, the one with the smallest residual is named. If several explain everything, the first of these is
# named: the order goes from those that say more to those that say less, because what is counted twice is scaled, too.
THEN: tuple[Hypothesis, ...] = (
    not_finite,
    norm_of_part,
    norm_not_seen,
    not_reached,
    tied_on_one_side,
    missing_reduction,
    clipped_differently,
    expert_gradients,
    counted_twice,
    scaled,
    low_precision,
    positions_restart,
    clipped_each_microbatch,
    averaged_over_own_tokens,
    averaged_over_ranks,
    unsynchronized_buffers,
    stale_buffers,
    scaled_buffers,
    other_optimizer,
    not_updated,
    optimizer_state,
    router_loss,
    part_of_sum,
    part,
)


def diagnose(evidence: Evidence) -> Explained:
    """Returns the cause of the first difference, or `unknown` with what is seen of it, and the names of the causes that
    were ruled out."""
    ruled_out: list[str] = []
    verdicts: list[Verdict] = []
    for group in (FIRST, THEN):
        for hypothesis in group:
            verdict = hypothesis(evidence)
            if verdict is not None:
                verdicts.append(verdict)
            else:
                ruled_out.append(hypothesis.__name__)
        if verdicts:
            break
    if not any(verdict.residual <= 1 for verdict in verdicts):
        verdicts += _apart_from_a_factor(evidence)
    if not verdicts:
        return Explained("unknown", describe(evidence), tuple(ruled_out))
    # All residuals that are no larger than rounding count as zero, and min takes the first of equal ones.
    best = min(verdicts, key=lambda verdict: 0.0 if verdict.residual <= 1 else verdict.residual)
    return Explained(best.cause, best.explanation, tuple(ruled_out))


def _apart_from_a_factor(evidence: Evidence) -> list[Verdict]:
    """Verdicts that explain everything but a constant factor of all gradients. Clipping that is not seen makes one: a
    fault in some gradients changes the norm, by which all are divided."""
    factor = _overall_factor(evidence)
    if factor is None:
        return []
    left = tuple(
        difference
        for difference in evidence.differences["gradient"]
        if not evidence.fits(evidence.scaled_misfit(difference.name or "", factor))
    )
    others = replace(evidence, divided_by=factor, differences={**evidence.differences, "gradient": left})
    verdicts = [verdict for hypothesis in THEN if (verdict := hypothesis(others)) is not None]
    return [
        replace(
            verdict,
            explanation=f"all gradients are {number(factor)} times the reference's, as if they were clipped by another"
            f" norm, which a fault in some of them changes; apart from this, {verdict.explanation}",
        )
        for verdict in verdicts
        if verdict.residual <= 1
    ]


def _overall_factor(evidence: Evidence) -> float | None:
    """The factor that most of those gradients have that are multiples of the reference's, if all gradients differ."""
    names = evidence.differing_gradients
    if evidence.equal_gradients or evidence.gradient_kind(evidence.candidate) == "unclipped":
        return None
    known = [(name, common) for name in names if (common := evidence.common_factor([name])) is not None]
    multiples = [(name, common) for name, common in known if evidence.fits(evidence.scaled_misfit(name, common[0]))]
    best: list[float] = []
    for _, (factor, uncertainty) in multiples:
        alike = [other for _, (other, _) in multiples if abs(other / factor - 1) <= 2 * uncertainty]
        if len(alike) > len(best):
            best = alike
    return sorted(best)[len(best) // 2] if len(names) / 4 <= len(best) < len(names) else None

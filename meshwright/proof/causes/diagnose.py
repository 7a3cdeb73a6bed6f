"""Finds out why a step differs. Hypotheses are checked one after the other; each is a function that gets the evidence
and returns a verdict, or None if it does not explain the difference."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshwright.proof.causes.batch_buffer import batch_buffer
from meshwright.proof.causes.batch_norm import batch_norm
from meshwright.proof.causes.clip import local_clip
from meshwright.proof.causes.coupled_samples import coupled_samples, divided_batch
from meshwright.proof.causes.evidence import Cause, Evidence, Verdict
from meshwright.proof.causes.optimizer import not_optimized
from meshwright.proof.causes.precision import low_precision
from meshwright.proof.causes.randomness import randomness
from meshwright.proof.causes.reduction import doubled_reduction, missing_reduction
from meshwright.proof.causes.samples import wrong_samples
from meshwright.proof.causes.scale import scaled
from meshwright.proof.causes.start import different_start
from meshwright.proof.causes.targets import uneven_targets, unweighted_shares
from meshwright.proof.causes.tied import tied_drift
from meshwright.proof.causes.tokens.border import lost_targets
from meshwright.proof.causes.tokens.experts import expert_gradients, lost_tokens
from meshwright.proof.causes.tokens.past import wrong_past
from meshwright.proof.causes.tokens.positions import wrong_positions
from meshwright.proof.compare.errors import Difference, ExaminedCause

Hypothesis = Callable[[Evidence], Verdict | None]

# Causes that exist before anything is computed. If one of them holds, it explains all later differences, and `THEN` is
# not checked.
FIRST: Mapping[Cause, Hypothesis] = {"different_start": different_start, "wrong_samples": wrong_samples}

# Of these causes, the one with the smallest residual is named. If several leave nothing but rounding, the first of
# these is named. The order matters, because a wrong reduction of experts or one made twice also scales gradients, and
# tied copies may drift apart for any of the causes before `tied_drift`.
THEN: Mapping[Cause, Hypothesis] = {
    "not_optimized": not_optimized,
    "local_clip": local_clip,
    "lost_tokens": lost_tokens,
    "expert_gradients": expert_gradients,
    "missing_reduction": missing_reduction,
    "doubled_reduction": doubled_reduction,
    "scaled": scaled,
    "coupled_samples": coupled_samples,
    "unweighted_shares": unweighted_shares,
    "uneven_targets": uneven_targets,
    "divided_batch": divided_batch,
    "wrong_past": wrong_past,
    "wrong_positions": wrong_positions,
    "lost_targets": lost_targets,
    "batch_norm": batch_norm,
    "batch_buffer": batch_buffer,
    "tied_drift": tied_drift,
    "randomness": randomness,
    "low_precision": low_precision,
}


def diagnose(evidence: Evidence, without: Cause | None = None) -> Difference:
    """Returns the first difference with its cause, or with the cause `unknown` if no hypothesis fits. Its `ruled_out`
    names the hypotheses that do not fit. `without` is a hypothesis that is not checked."""
    ruled_out: list[str] = []
    verdicts: list[Verdict] = []
    for group in (FIRST, THEN):
        for cause, hypothesis in group.items():
            verdict = None if cause == without else hypothesis(evidence)
            if verdict is not None:
                verdicts.append(verdict)
            elif cause != without:
                ruled_out.append(cause)
        if verdicts:
            break
    if not verdicts:
        causes = ", ".join(ruled_out).replace("_", " ")
        best = Verdict("unknown", f"none of the causes that are looked for: {causes}")
    else:
        # All residuals that are no larger than rounding count as zero, and min takes the first of equal ones.
        best = min(verdicts, key=lambda verdict: 0.0 if evidence.fits(verdict.residual) else verdict.residual)
    others = [verdict.cause for verdict in verdicts if verdict is not best]
    also = f" ({', '.join(others).replace('_', ' ')} would explain it, too, but no better)" if others else ""
    return replace(
        evidence.difference,
        cause=best.cause,
        explanation=f"{best.explanation}{also}",
        ruled_out=tuple(ruled_out),
        fitting=tuple(ExaminedCause(verdict.cause, verdict.explanation, verdict.residual) for verdict in verdicts),
    )

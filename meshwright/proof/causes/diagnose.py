"""Why a step differs: hypotheses are checked one after the other, each a function of the evidence."""

from collections.abc import Callable, Mapping
from dataclasses import replace

from meshwright.proof.causes.batch_norm import batch_norm
from meshwright.proof.causes.clip import local_clip
from meshwright.proof.causes.evidence import Cause, Evidence, Verdict
from meshwright.proof.causes.optimizer import not_optimized
from meshwright.proof.causes.precision import low_precision
from meshwright.proof.causes.randomness import randomness
from meshwright.proof.causes.reduction import doubled_reduction, missing_reduction
from meshwright.proof.causes.samples import wrong_samples
from meshwright.proof.causes.scale import scaled
from meshwright.proof.causes.start import different_start
from meshwright.proof.causes.targets import uneven_targets
from meshwright.proof.causes.tied import tied_drift
from meshwright.proof.compare.errors import Difference

Hypothesis = Callable[[Evidence], Verdict | None]

# These causes exist before anything is computed, and explain all differences that come after them.
FIRST: Mapping[Cause, Hypothesis] = {"different_start": different_start, "wrong_samples": wrong_samples}

# Of these, the one with the smallest residual is named; if several leave nothing but rounding, the first of them. A
# reduction made twice is also a scale, and tied copies may drift apart for any of the reasons before.
THEN: Mapping[Cause, Hypothesis] = {
    "not_optimized": not_optimized,
    "local_clip": local_clip,
    "missing_reduction": missing_reduction,
    "doubled_reduction": doubled_reduction,
    "scaled": scaled,
    "uneven_targets": uneven_targets,
    "batch_norm": batch_norm,
    "tied_drift": tied_drift,
    "randomness": randomness,
    "low_precision": low_precision,
}


def diagnose(evidence: Evidence, without: Cause | None = None) -> Difference:
    """The first difference with its cause, or `unknown` and everything that it is not. `without` leaves out one
    hypothesis."""
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
        evidence.difference, cause=best.cause, explanation=f"{best.explanation}{also}", ruled_out=tuple(ruled_out)
    )

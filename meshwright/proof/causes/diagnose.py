"""Why a step differs: hypotheses asked one after the other, each a function of the evidence."""

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

# What these find is there before anything is computed, and explains all that comes after it.
FIRST: Mapping[Cause, Hypothesis] = {"different_start": different_start, "wrong_samples": wrong_samples}

# Of the others the one that leaves least unexplained; where several leave nothing, the first. A reduction made twice is
# a scale, too, and copies that drift apart may do so for any of the reasons before.
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
    """The first difference with its cause, or `unknown` and all that it is not. `without` asks one hypothesis less."""
    ruled_out: list[str] = []
    verdicts: list[Verdict] = []
    for group in (FIRST, THEN):
        for word, ask in group.items():
            verdict = None if word == without else ask(evidence)
            if verdict is not None:
                verdicts.append(verdict)
            elif word != without:
                ruled_out.append(word)
        if verdicts:
            break
    if not verdicts:
        told = Verdict("unknown", f"none of the causes that are looked for: {', '.join(ruled_out).replace('_', ' ')}")
    else:
        # Whatever fits within the tolerance fits: what is left then is rounding, and min takes the first.
        told = min(verdicts, key=lambda verdict: 0.0 if evidence.fits(verdict.residual) else verdict.residual)
    others = [verdict.cause for verdict in verdicts if verdict is not told]
    also = f" ({', '.join(others).replace('_', ' ')} would explain it, too, but no better)" if others else ""
    return replace(
        evidence.first, cause=told.cause, explanation=f"{told.explanation}{also}", ruled_out=tuple(ruled_out)
    )

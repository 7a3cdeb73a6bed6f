"""Compares the ranks' gradients with those that one device computes by a wrong rule for divided sequences."""

from collections.abc import Mapping

from meshwright.proof.causes.evidence import Cause, Evidence, Verdict
from meshwright.proof.reference.wrong_sequences import WrongSequence


def explain_by(evidence: Evidence, cause: Cause, rules: Mapping[str, type[WrongSequence]]) -> Verdict | None:
    """Returns a verdict with the text of the rule that explains the gradients best; None if no rule does, or if the
    plan does not divide sequences."""
    ranks = evidence.plan.axes.context
    if ranks == 1 or not evidence.gradients_differ:
        return None
    verdicts = []
    for text, mode in rules.items():
        gradients = evidence.experiments.run(within=mode(ranks)).gradients
        misfit = evidence.misfit(gradients)
        if evidence.fits(misfit) and evidence.is_distinguishable(gradients):
            verdicts.append(Verdict(cause, text, misfit))
    return min(verdicts, key=lambda verdict: verdict.residual, default=None)

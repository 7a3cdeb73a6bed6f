"""The cause `lost_targets`: targets are missing at the borders between the pieces of a divided sequence."""

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.causes.tokens.experiment import explain_by
from meshwright.proof.reference.wrong_sequences import LostTargets


def lost_targets(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when the last token of each piece but the last has no
    target."""
    pieces = 2 * evidence.plan.axes.context
    rule = (
        f"the last token of each of the {pieces} pieces of a sequence has lost its target, which is in the next piece"
    )
    return explain_by(evidence, "lost_targets", {rule: LostTargets})

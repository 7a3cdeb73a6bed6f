"""The cause `wrong_past`: tokens attend to other tokens than on one device, because of how ranks divide them."""

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.causes.tokens.experiment import explain_by
from meshwright.proof.reference.wrong_sequences import FutureOfOtherRanks, OwnPastOnly


def wrong_past(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when queries attend to keys of their own rank only, or
    also to later keys of other ranks."""
    ranks = evidence.plan.axes.context
    rules = {
        f"tokens attend to the tokens of their own rank only, not to those of the other {ranks - 1}": OwnPastOnly,
        "tokens attend to later tokens that another rank has": FutureOfOtherRanks,
    }
    return explain_by(evidence, "wrong_past", rules)

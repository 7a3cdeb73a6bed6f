"""The cause `wrong_positions`: a rank of the context axis numbers its tokens from 0."""

from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.causes.tokens.experiment import explain_by
from meshwright.proof.reference.wrong_sequences import LocalPositions


def wrong_positions(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when the tokens of each rank have the positions from 0
    on."""
    rule = "the positions of tokens are off by a rank's offset: each rank numbers its tokens from 0"
    return explain_by(evidence, "wrong_positions", {rule: LocalPositions})

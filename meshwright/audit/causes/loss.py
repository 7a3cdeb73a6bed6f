"""The cause `loss_only`: the losses that backward was called on differ, and the gradients do not."""

from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.factors.scaled import mean_loss
from meshwright.audit.causes.wording import number
from meshwright.audit.evidence import Evidence, Verdict


def loss_only(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in the loss and no gradient differs."""
    if evidence.difference.what != "loss" or evidence.differing_gradients:
        return None
    right, own = (mean_loss(run, evidence.step) for run in (evidence.reference, evidence.candidate))
    if not right or own is None:
        return None
    known = recognize(own / right, 1e-3, counts_of(evidence)) if own else None
    factor = f", {number(own / right)} times as much{f': {known}' if known else ''}" if own else ""
    return Verdict(
        "loss_only",
        f"backward was called on losses with the mean {number(own)}, in the reference {number(right)}{factor}; all"
        " gradients are equal, so the same is trained and only the number differs",
    )

"""The causes `not_updated` and `optimizer_state`: gradients and options are equal, and the weights are not updated, or
not as the gradients of all steps so far and the options say."""

import torch
from torch import Tensor

from meshwright.audit.causes.updates.simulate import explains, options_of, simulate
from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import Evidence, Verdict
from meshwright.audit.recorded_run import RecordedRun

_ONLY_SEEN = 2.0


def not_updated(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if weights that the reference updates are on some ranks still those of before the step."""
    if evidence.difference.what != "weight":
        return None
    found: dict[str, set[int]] = {}
    for difference in evidence.differences.get("weight", ()):
        name = difference.name or ""
        right = evidence.reference.whole(evidence.step, "weight", name)
        before, old = (_before(run, evidence.step, name) for run in (evidence.reference, evidence.candidate))
        if right is None or before is None or old is None or old.shape != right.shape:
            continue
        for part in evidence.candidate.parts(evidence.step, "weight", name):
            moved = not torch.equal(part.region.of(right), part.region.of(before))
            if moved and part.value.numel() and torch.equal(part.value.flatten(), part.region.of(old).flatten()):
                found.setdefault(name, set()).add(part.rank)
    if evidence.difference.name not in found:
        return None
    ranks = found[evidence.difference.name or ""]
    holders = {part.rank for part in evidence.candidate.parts(evidence.step, "weight", evidence.difference.name or "")}
    if ranks == holders:
        reason = "no optimizer of the candidate updates them"
    else:
        reason = f"{list_ranks(holders - ranks)} updated theirs: what one rank updates is not sent to the others"
    return Verdict(
        "not_updated",
        f"{list_names(found)} on {list_ranks(ranks)} {'is' if len(found) == 1 else 'are'} the same after step"
        f" {evidence.step} as before it, with a right gradient; {reason}",
    )


def optimizer_state(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if gradients and options are equal, but not the weights after the step: says what the update is
    instead, where that can be computed."""
    name = evidence.difference.name
    if evidence.difference.what != "weight" or name is None:
        return None
    right, own = options_of(evidence.reference), options_of(evidence.candidate)
    runs = (evidence.reference, evidence.candidate)
    expected, recorded = (run.whole_plain(evidence.step, "weight", name) for run in runs)
    if name not in right or name not in own or expected is None or recorded is None:
        return None
    if right[name] != own[name] or expected.shape != recorded.shape:
        return None
    all_steps, only_this = range(1, evidence.step + 1), range(evidence.step, evidence.step + 1)
    run = evidence.candidate
    known = explains(simulate(evidence.reference, name, right[name], all_steps), expected, recorded)
    what = ""
    if known and evidence.step > 1 and explains(simulate(run, name, own[name], only_this), recorded, expected):
        what = "it is the one of an optimizer whose state is empty: the state of earlier steps was lost or is made anew"
    elif known and explains(simulate(run, name, own[name], all_steps, "unclipped"), recorded, expected):
        what = "it is made of the gradients before clipping"
    elif known:
        what = _update_factor(evidence, name, expected, recorded)
    names = [difference.name or "" for difference in evidence.differences.get("weight", ())]
    earlier = f" and was equal until step {evidence.step - 1}" if evidence.step > 1 else ""
    start = (
        f"the update of {list_names(names)} in step {evidence.step} differs{earlier}, with equal gradients and options"
    )
    if what:
        return Verdict("optimizer_state", f"{start}; {what}", 0.5)
    reference = "the reference's is what its options give" if known else "options were recorded in the first step only"
    usual = "the optimizer's state (momentum, second moments, step count, master weights) is not the reference's"
    return Verdict("optimizer_state", f"{start}; {reference}: {usual}, or its schedule", _ONLY_SEEN)


def _update_factor(evidence: Evidence, name: str, expected: Tensor, recorded: Tensor) -> str:
    """Says by which constant the update differs, if it is one."""
    before, own_before = (
        run.whole_plain(evidence.step - 1, "weight" if evidence.step > 1 else "start", name)
        for run in (evidence.reference, evidence.candidate)
    )
    if before is None or own_before is None:
        return ""
    right, own = expected.double() - before.double(), recorded.double() - own_before.double()
    square = float(right.square().sum())
    factor = float((own * right).sum()) / square if square else 0.0
    if not factor or not explains(own_before.double() + factor * right, recorded, expected):
        return ""
    return f"it is {number(factor)} times the one that gradients and options give"


def _before(run: RecordedRun, step: int, name: str) -> Tensor | None:
    return run.whole(step - 1, "weight" if step > 1 else "start", name)

"""The causes `stale_buffers`, `unsynchronized_buffers` and `scaled_buffers`."""

import torch
from torch import Tensor

from meshwright.audit.causes.copies import Copies, copies_of
from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.samples import ranks_by_samples
from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict, misfit

_GRADIENTS_NOT_COMPUTED = 1.4  # the residual if gradients differ, too, which cannot be computed from a record
_MEAN_IS_WRONG = 1.3  # the residual if ranks have different copies, whose mean is not the reference's
_ROUNDING = 1e-5  # of a buffer's largest element


def unsynchronized_buffers(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if ranks have different copies of a buffer, and their mean is the reference's: each rank
    updates it with its own samples. If gradients differ as well, so does what each rank computes with it (batch
    normalization over the rank's own samples), provided that ranks have different samples."""
    names = [difference.name for difference in evidence.differences.get("buffer", ()) if difference.name]
    found = {name: copies for name in names if (copies := _averaged(evidence, name)) is not None}
    if not found and evidence.difference.what == "buffer":
        return _different(evidence)
    if not found or (evidence.differing_gradients and len(ranks_by_samples(evidence.candidate, evidence.step)) < 2):
        return None
    copies = next(iter(found.values()))
    groups = ", and ".join(list_ranks(group.ranks) for group in copies.groups[:4])
    also = (
        ". Gradients differ, too: what is computed from a rank's own samples, as by batch normalization, is not that of"
        " all samples"
        if evidence.differing_gradients
        else ""
    )
    return Verdict(
        "unsynchronized_buffers",
        f"{list_names(found)} {'has' if len(found) == 1 else 'have'} different copies on {groups}, whose mean is the"
        " reference's: each rank"
        f" updates its own from its own samples{also}",
        _GRADIENTS_NOT_COMPUTED if evidence.differing_gradients else 0.5,
    )


def _different(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if ranks have different copies of the buffer, in whatever relation to the reference's."""
    name = evidence.difference.name or ""
    right = evidence.reference.whole(evidence.step, "buffer", name)
    if right is None:
        return None
    allowed = _allowed(right)
    parts = evidence.candidate.parts(evidence.step, "buffer", name)
    copies = next((one for one in copies_of(parts, lambda region: region.of(allowed)) if one.differ), None)
    if copies is None:
        return None
    groups = ", and ".join(list_ranks(group.ranks) for group in copies.groups[:4])
    return Verdict(
        "unsynchronized_buffers",
        f"{name} has different copies on {groups}, and the reference has one: each rank updates its own, from its own"
        " samples or counts, without the other ranks'",
        _MEAN_IS_WRONG,
    )


def _averaged(evidence: Evidence, name: str) -> Copies | None:
    right = evidence.reference.whole(evidence.step, "buffer", name)
    if right is None or not right.is_floating_point():
        return None
    allowed = _allowed(right)
    for copies in copies_of(evidence.candidate.parts(evidence.step, "buffer", name), lambda region: region.of(allowed)):
        if copies.differ:
            mean = torch.stack([group.value for group in copies.groups]).mean(0)
            if misfit(mean, copies.region.of(right), copies.region.of(allowed)) <= SLACK:
                return copies
    return None


def stale_buffers(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in a buffer which on some ranks is still that of the step before."""
    name = evidence.difference.name
    if evidence.difference.what != "buffer" or name is None:
        return None
    right = evidence.reference.whole(evidence.step, "buffer", name)
    before = _before(evidence, name)
    if right is None or before is None:
        return None
    allowed = _allowed(right)
    stale = []
    for part in evidence.candidate.parts(evidence.step, "buffer", name):
        own, old, new = part.value, part.region.of(before), part.region.of(right)
        if misfit(own, old, part.region.of(allowed)) <= SLACK < misfit(new, old, part.region.of(allowed)):
            stale.append(part.rank)
    wrong = set(evidence.difference.ranks) or set(stale)
    if not stale or not wrong <= set(stale):
        return None
    return Verdict(
        "stale_buffers",
        f"the buffer {name} on {list_ranks(stale)} is that of before step {evidence.step}; in the reference it changes:"
        " it is not updated there, or overwritten by an older one",
    )


def _before(evidence: Evidence, name: str) -> Tensor | None:
    step = evidence.step - 1
    return evidence.candidate.whole(step, "buffer" if step else "start", name)


def scaled_buffers(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in a buffer which is the reference's times a number of the training:
    it is summed over ranks or micro-batches, or reduced in place more than once."""
    name = evidence.difference.name
    if evidence.difference.what != "buffer" or name is None:
        return None
    right, own = (run.whole(evidence.step, "buffer", name) for run in (evidence.reference, evidence.candidate))
    if right is None or own is None or right.shape != own.shape:
        return None
    right, own = right.double(), own.double()
    square = float(right.square().sum())
    factor = float((own * right).sum()) / square if square else 0.0
    allowed = _allowed(right) * max(1.0, abs(factor))
    if factor <= 0 or misfit(own, factor * right, allowed) > SLACK:
        return None
    known = recognize(factor, 1e-4, counts_of(evidence))
    if known is None and not (round(factor) > 1 and abs(factor - round(factor)) < 1e-4):
        return None
    meaning = f", {known.split(':')[0]}" if known else ""
    return Verdict(
        "scaled_buffers",
        f"the buffer {name} is {number(factor)} times the reference's{meaning}: it is"
        " added up over ranks or micro-batches, or reduced in place more than once",
    )


def _allowed(value: Tensor) -> Tensor:
    largest = float(value.abs().max()) if value.numel() else 0.0
    return torch.full(value.shape, _ROUNDING * (largest or 1.0), dtype=torch.float64)

"""The cause `different_start`: weights or buffers differed before the first step."""

from torch import Tensor

from meshwright.audit.causes.own_copies import own_copies
from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import Evidence, Verdict

_CLOSE = 1e-6


def different_start(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in the start. All later differences may follow from it."""
    if evidence.difference.step > 0:
        return None
    first = evidence.difference
    copies = own_copies(evidence.candidate)
    if copies:
        return Verdict(
            "different_start",
            f"ranks of the candidate make different copies of {list_names(copy.name or '' for copy in copies)}: on"
            f" {list_ranks(copies[0].ranks)} {copies[0].name} differs from that of the first rank by"
            f" {number(copies[0].error)} of its largest value. Each rank draws its own, and they are not broadcast",
        )
    names = [difference.name or "" for difference in evidence.differences.get("start", ())]
    where = f" on {list_ranks(first.ranks)}" if first.ranks and len(first.ranks) < evidence.candidate.world_size else ""
    return Verdict(
        "different_start",
        f"the trainings start from other values of {list_names(names)}{where}, the first by {number(first.error)} of"
        f" its largest value{_relation(evidence, first.name or '')}",
    )


def _relation(evidence: Evidence, name: str) -> str:
    right, own = (run.whole(0, "start", name) for run in (evidence.reference, evidence.candidate))
    if right is None or own is None or right.shape != own.shape or not right.numel():
        return ""
    right, own = right.double(), own.double()
    if _is_close(own.flatten().sort().values, right.flatten().sort().values):
        return ": the same numbers at other places, so the parts are put together in another order"
    square = float(right.square().sum())
    factor = float((own * right).sum()) / square if square else 0.0
    if factor and _is_close(own, factor * right):
        return f": it is {number(factor)} times the reference's"
    return ""


def _is_close(value: Tensor, right: Tensor) -> bool:
    return float((value - right).abs().max()) <= _CLOSE * (float(right.abs().max()) or 1.0)

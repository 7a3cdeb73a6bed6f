"""The cause `part`: only some rows or columns of a gradient differ, or only what some ranks hold; and `describe`, which
says of any difference what is seen."""

import torch
from torch import Tensor

from meshwright.audit.causes.copies import gradient_copies
from meshwright.audit.causes.counts import counts_of, recognize
from meshwright.audit.causes.wording import list_names, list_numbers, list_ranks, number
from meshwright.audit.evidence import SLACK, Difference, Evidence, Verdict, distinct, misfit
from meshwright.audit.recorder.sketches import Sketch

_ONLY_WHERE = 3.0  # the residual of a verdict that says where, and not why
_DIMS = ("row", "column")


def part(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the differences are confined to a part: a range of one dimension, or some ranks' parts of
    what is divided. It is complete if the part is multiplied by a constant, or its rows stand in another order."""
    found = [
        (difference, _where(evidence, difference)) for difference in distinct(evidence.differences.get("gradient", ()))
    ]
    places = [(difference, place) for difference, place in found if place is not None]
    if not places or len(places) < len(found):
        return None
    difference, (wrong, text) = places[0][0], places[0][1]
    name = difference.name or ""
    change, residual = _change(evidence, difference, wrong)
    others = [other.name or "" for other, _ in places[1:]]
    also = f"; so are parts of {list_names(others)}" if others else ""
    place = f"{text}{_on(evidence, difference, wrong)}"
    return Verdict("part", f"of the gradient of {name}, only {place}{change}{also}", residual)


def _where(evidence: Evidence, difference: Difference) -> tuple[Tensor, str] | None:
    """A mask of what differs, and its text. None if all differs, or a side has no gradient."""
    name = difference.name or ""
    right, own = evidence.expected(name), evidence.recorded(name, _wrong_rank(difference))
    if right is None or own is None or own.shape != right.shape or right.numel() < 2:
        return None
    differs = (own - right).abs() > evidence.allowed_error(name, right)
    if difference.rows and right.dim() > 1:
        differs[list(difference.rows)] = True
    shares = []
    sketch = evidence.reference.sketch(name)
    for dim in range(right.dim()):
        others = [other for other in range(right.dim()) if other != dim]
        touched = differs.any(others[0]) if len(others) == 1 else differs.amax(others) if others else differs
        shares.append((float(touched.double().mean()), dim, touched))
    share, dim, touched = min(shares, key=lambda entry: entry[0])
    if not 0 < share <= 0.75:
        return None
    kind = "element" if right.dim() == 1 else _DIMS[dim] if dim < 2 else f"index of dimension {dim}"
    indices = [int(index) for index in touched.nonzero().reshape(-1)]
    several = len(indices) > 1
    text = f"{kind}{'s' if several and dim < 2 else ''} {list_numbers(indices)} of {right.shape[dim]}"
    verb = "differ" if several else "differs"
    if sketch is not None and dim == 1:
        text, verb = f"columns among {_columns(sketch, indices)} of {sketch.columns}", "differ"
    shape = [1] * right.dim()
    shape[dim] = -1
    return touched.reshape(shape).expand(right.shape), f"{text} {verb}"


def _columns(sketch: Sketch, slots: list[int]) -> str:
    columns: set[int] = set()
    for slot in slots:
        first, last = sketch.columns_of(slot)
        columns.update(range(first, last + 1))
    return list_numbers(sorted(columns))


def _wrong_rank(difference: Difference) -> int | None:
    """The first rank whose values differ. Other ranks may hold right copies of the same part."""
    return min(difference.ranks, default=None)


def _on(evidence: Evidence, difference: Difference, wrong: Tensor) -> str:
    """Says which ranks hold what differs, if not all do, and which hold right copies of it."""
    parts = evidence.recorded_parts(difference.name or "")
    holders = {one.rank for one in parts if bool(one.region.of(wrong).any())}
    ranks = holders & set(difference.ranks) or holders
    if len(ranks) == len({one.rank for one in parts}):
        return ""
    copies = f", whose copies differ from the right ones on {list_ranks(holders - ranks)}" if holders - ranks else ""
    return f" (on {list_ranks(ranks)}{copies})"


def _change(evidence: Evidence, difference: Difference, wrong: Tensor) -> tuple[str, float]:
    name = difference.name or ""
    right, own = evidence.expected(name), evidence.recorded(name, _wrong_rank(difference))
    assert right is not None
    assert own is not None
    values, expected = own[wrong], right[wrong]
    allowed = evidence.allowed_error(name, right)[wrong]
    if not bool(values.any()):
        return "; what differs is zero", 0.0
    square = float(expected.square().sum())
    factor = float((values * expected).sum()) / square if square else 0.0
    left, was = float((values - factor * expected).norm()), float((values - expected).norm())
    if factor and misfit(values, factor * expected, allowed * abs(factor)) <= SLACK and left <= was / 2:
        uncertainty = min(0.02, max(1e-6, float((expected.abs() * allowed).sum()) / square))
        known = recognize(factor, uncertainty, counts_of(evidence, [name]))
        return f"; what differs is multiplied by {number(factor)}{f', {known}' if known else ''}", 1 / SLACK
    if right.dim() > 1 and _is_permuted(evidence, name, right, own):
        return "; these are the reference's rows in another order: parts are put together in another order", 1 / SLACK
    error = float((values - expected).abs().max()) / (float(expected.abs().max()) or 1.0)
    return f", by up to {number(error)} of their largest value and by no constant factor", _ONLY_WHERE


def _is_permuted(evidence: Evidence, name: str, right: Tensor, own: Tensor) -> bool:
    rows, own_rows = (value.reshape(len(value), -1) for value in (right, own))
    if len(rows) > 4096:
        return False
    nearest = torch.cdist(own_rows, rows).argmin(1)
    allowed = evidence.allowed_error(name, right)
    in_order = right[nearest]
    moved = len(set(nearest.tolist())) == len(rows) and not torch.equal(nearest, torch.arange(len(rows)))
    return moved and misfit(own, in_order, torch.maximum(allowed, allowed[nearest])) <= SLACK


def describe(evidence: Evidence) -> str:
    """What is seen of a difference that no cause explains."""
    names, others = evidence.differing_gradients, evidence.equal_gradients
    first = evidence.difference
    if not names:
        subject = f"{first.what}{f' of {first.name}' if first.name else ''}"
        where = f" on {list_ranks(first.ranks)}" if first.ranks else ""
        return f"the first difference is in the {subject}{where}, by {number(first.error)} of its largest value"
    which = f"{len(names)} of {len(names) + len(others)} gradients differ ({list_names(names)})"
    common = evidence.common_factor(names)
    factor = f"; along the reference's they are {number(common[0])} times as long" if common else ""
    apart = [name for name in names if any(copies.differ for copies in gradient_copies(evidence, name))]
    copies = (
        f"; the copies of {list_names(apart)} differ between ranks, and neither their sum nor their mean is the"
        " reference's"
        if apart
        else "; copies are equal on all ranks"
        if evidence.candidate.world_size > 1
        else ""
    )
    return which + factor + copies

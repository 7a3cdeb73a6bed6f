"""The cause `missing_reduction` where no rank recorded what is missing: rows c of a gradient r look like one of several
parts of a sum, to which other ranks' heads or columns would add. Such parts are nearly at right angles to each other:

    0 < φ = <c, r> / <r, r> < 1,    <c, r - c> ≈ 0
"""

import torch
from torch import Tensor

from meshwright.audit.causes.samples import ranks_by_samples
from meshwright.audit.causes.wording import list_numbers, list_ranks, may_follow, number
from meshwright.audit.evidence import SLACK, Evidence, Verdict

_ONLY_SEEN = 2.5  # the residual of a cause whose missing part cannot be computed from a record
_SHARES = (0.15, 0.85)
_LARGEST_COSINE = 0.25
_FEWEST_ELEMENTS = 64
_MOST_ZEROS = 0.02  # of the elements: a part that is cut off is no part of a sum


def part_of_sum(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the gradient that was computed first among those that differ has such rows, one after the
    other, its other rows are right, and several ranks have the same samples."""
    names = evidence.differing_gradients
    groups = [ranks for ranks in ranks_by_samples(evidence.candidate, evidence.step) if len(ranks) > 1]
    if not names or not groups:
        return None
    name = names[-1]
    right, own = evidence.expected(name), evidence.recorded(name)
    if right is None or own is None or own.shape != right.shape or right.dim() != 2:
        return None
    rows = _differing_rows(evidence, name, right, own)
    if not rows or len(rows) == len(right) or rows[-1] - rows[0] + 1 != len(rows):
        return None
    share, cosine = _relation(own[rows], right[rows])
    here, there = (evidence.reference.plain(name, value)[rows] == 0 for value in (own, right))
    zeros = float(here.double().mean()) - float(there.double().mean())
    if not _SHARES[0] < share < _SHARES[1] or abs(cosine) > _LARGEST_COSINE or zeros > _MOST_ZEROS:
        return None
    if own[rows].numel() < _FEWEST_ELEMENTS:
        return None
    parts = evidence.recorded_parts(name)
    wrong = torch.zeros(right.shape, dtype=torch.bool)
    wrong[rows] = True
    holders = {part.rank for part in parts if bool(part.region.of(wrong).any())}
    group = next((ranks for ranks in groups if holders & set(ranks)), groups[0])
    others = names[:-1]
    also = may_follow(others)
    return Verdict(
        "missing_reduction",
        f"rows {list_numbers(rows)} of the gradient of {name}, on {list_ranks(holders)}, look like one part of a sum:"
        f" along the reference's rows they are {number(share)} of them, and what is missing is at right angles to them"
        f" (cosine {number(cosine)}); no rank recorded it. {list_ranks(group).capitalize()} have the same samples, so"
        " they are a tensor group: what comes from these rows is used on all of them, by each for its own heads or"
        f" columns, and its gradient is not summed over them{also}",
        _ONLY_SEEN,
    )


def _differing_rows(evidence: Evidence, name: str, right: Tensor, own: Tensor) -> list[int]:
    differs = ((own - right).abs() > SLACK * evidence.allowed_error(name, right)).any(1)
    return [int(row) for row in differs.nonzero().reshape(-1)]


def _relation(own: Tensor, right: Tensor) -> tuple[float, float]:
    """φ, and the cosine of the angle between what is there and what is missing."""
    missing = right - own
    lengths = float(own.norm() * missing.norm())
    return float((own * right).sum() / right.square().sum()), float((own * missing).sum()) / lengths if lengths else 1.0

"""`decide`: whether a difference is a fault, or only rounding that was unlucky.

A unit of a ReLU whose input is almost 0, or a router between two experts, may follow either side after a rounding, and
then a few gradients differ by much. The noise run shows it if it comes upon the same unit, which is not certain. But
from another start, other units are undecided, and a fault is where it was. So a difference that may be rounding counts
if it is seen from two starts."""

from collections.abc import Sequence
from dataclasses import replace

from meshwright.audit.evidence import MOST_ROWS, Difference
from meshwright.audit.result import Audit

_MOST_STARTS = 3
_SURE = 0.2  # the norm of all errors of a tensor relative to the tensor's, from which on one start is enough


def decide(results: Sequence[Audit]) -> Audit | None:
    """The result of audits of the same commands from different starts; None if one more is needed."""
    last, earlier = results[-1], results[:-1]
    first = last.first_difference
    if first is None:
        return replace(last, notes=(*last.notes, *_not_again(earlier))) if last.equal else last
    if not last.comparable or first.step == 0 or not first.share <= _SURE:
        return last
    for other in earlier:
        if _recurs(first, other):
            return last
        if other.first_difference is not None and _recurs(other.first_difference, last):
            return other
    if len(results) < _MOST_STARTS:
        return None
    note = f"from each of {len(results)} starts, something else differs: rounding may decide it, as in a ReLU near 0"
    return replace(last, notes=(*last.notes, note))


def _recurs(difference: Difference, other: Audit) -> bool:
    """Whether the other audit has a difference in the same tensor, and in one of the same rows if these are few."""
    for again in other.differences:
        if (again.what, again.name) == (difference.what, difference.name):
            few = 0 < len(again.rows) < MOST_ROWS and 0 < len(difference.rows) < MOST_ROWS
            if not few or set(again.rows) & set(difference.rows):
                return True
    return False


def _not_again(earlier: Sequence[Audit]) -> list[str]:
    notes = []
    for audit in earlier:
        first = audit.first_difference
        if first is not None:
            what = f"{first.what} of {first.name}" if first.name else first.what
            notes.append(
                f"from another start, the {what} in step {first.step} is {first.error:.1e} off, and from this one it is"
                " not: rounding decides it, as in a ReLU near 0"
            )
    return notes

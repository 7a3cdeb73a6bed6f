"""`copies_of`: the copies of each region of a tensor that several ranks hold, and which of them are equal."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.audit.evidence import SLACK, Evidence, misfit
from meshwright.audit.recorder.parts import Region
from meshwright.audit.recorder.whole import WrittenPart


@dataclass(frozen=True)
class EqualCopies:
    """Ranks whose copies of a region are equal up to rounding, and the copy of the first of them, in fp64."""

    ranks: tuple[int, ...]
    value: Tensor


@dataclass(frozen=True)
class Copies:
    """The copies of one region of a tensor, by which of them are equal."""

    region: Region
    groups: tuple[EqualCopies, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(sorted(rank for group in self.groups for rank in group.ranks))

    @property
    def differ(self) -> bool:
        return len(self.groups) > 1


def copies_of(parts: Iterable[WrittenPart], allowed: Callable[[Region], Tensor]) -> list[Copies]:
    """The copies of each region. Copies are equal if no element differs by more than is allowed in the region."""
    by_region: dict[Region, list[WrittenPart]] = {}
    for part in parts:
        by_region.setdefault(part.region, []).append(part)
    return [Copies(region, _equal_copies(copies, allowed(region))) for region, copies in by_region.items()]


def _equal_copies(copies: list[WrittenPart], allowed: Tensor) -> tuple[EqualCopies, ...]:
    groups: list[EqualCopies] = []
    for part in copies:
        value = part.value.to(torch.float64)
        for index, group in enumerate(groups):
            if misfit(value, group.value, allowed) <= SLACK:
                groups[index] = EqualCopies((*group.ranks, part.rank), group.value)
                break
        else:
            groups.append(EqualCopies((part.rank,), value))
    return tuple(groups)


def gradient_copies(evidence: Evidence, name: str) -> list[Copies]:
    """The copies of the regions of a gradient before clipping; empty if a side has no gradient."""
    expected = evidence.expected(name)
    if expected is None:
        return []
    allowed = evidence.allowed_error(name, expected)
    return copies_of(evidence.recorded_parts(name), lambda region: region.of(allowed))


def fewest_copies(evidence: Evidence, name: str) -> int:
    """The number of ranks that hold a copy of each region of a parameter; of the region that the fewest hold."""
    holders: dict[Region, int] = {}
    for part in evidence.recorded_parts(name):
        holders[part.region] = holders.get(part.region, 0) + 1
    return min(holders.values(), default=0)

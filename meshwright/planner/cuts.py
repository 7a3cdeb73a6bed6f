"""Where to cut a model into pipeline stages, so that the slowest is as fast as it can be.

    slowest(S) = min over cuts of max over stages of the stage's cost                       balanced
    a bound B holds if stages filled up to B, from the last piece to the first, are at most S     _filled

Pieces keep their order and cuts lie only where the model can be cut, so the least B that holds is found by bisection.
Filling from the end leaves what is left over to the first stage, which keeps the most microbatches.
"""

from collections.abc import Sequence

_HALVINGS = 24


def balanced(costs: Sequence[float], cuttable: Sequence[bool], stages: int) -> tuple[int, ...] | None:
    """The pieces that end a stage, `stages` - 1 of them; None where there are not as many places to cut.
    `cuttable[i]` says whether the model can be cut behind piece i."""
    lumps = _lumps(costs, cuttable)
    if len(lumps) < stages:
        return None
    low, high = max(cost for _, cost in lumps), sum(costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if len(_filled(lumps, middle)) <= stages:
            high = middle
        else:
            low = middle
    ends = _filled(lumps, high)
    return tuple(_more(lumps, ends, stages)[:-1])


_Lump = tuple[int, float]  # the last of pieces that no cut parts, and their cost


def _lumps(costs: Sequence[float], cuttable: Sequence[bool]) -> list[_Lump]:
    lumps: list[_Lump] = []
    cost = 0.0
    for piece, own in enumerate(costs):
        cost += own
        if cuttable[piece] or piece == len(costs) - 1:
            lumps.append((piece, cost))
            cost = 0.0
    return lumps


def _filled(lumps: Sequence[_Lump], bound: float) -> list[int]:
    """The last piece of each stage, in order."""
    ends: list[int] = []
    filled = float("inf")
    for piece, cost in reversed(lumps):
        if filled + cost > bound * (1 + 1e-9):
            ends.append(piece)
            filled = 0.0
        filled += cost
    return ends[::-1]


def _more(lumps: Sequence[_Lump], ends: list[int], stages: int) -> list[int]:
    """As many stages as asked for: the costliest that can be parted are, in halves."""
    found = list(ends)
    while len(found) < stages:
        options = []
        begin = 0
        for end in found:
            inside = [lump for lump in lumps if begin <= lump[0] <= end]
            if len(inside) > 1:
                options.append((sum(cost for _, cost in inside), inside))
            begin = end + 1
        _, inside = max(options, key=lambda option: option[0])
        half, cost = sum(c for _, c in inside) / 2, 0.0
        for piece, own in inside[:-1]:
            cost += own
            if cost >= half or piece == inside[-2][0]:
                found.append(piece)
                break
        found.sort()
    return found

"""Where to cut a model into pipeline stages, so that the slowest is as fast as it can be.

    slowest(S) = min over cuts of max over stages of the stage's cost                       balanced
    a bound B holds if stages filled up to B, from the last piece to the first, are at most S     _filled

    and of all cuts with that slowest stage, those with the least sum of squared costs            _even

Pieces keep their order and cuts lie only where the model can be cut, so the least B that holds is found by bisection.
Even stages wait less for each other where a rank has several.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

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
    return _even(lumps, high, stages)


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


def _even(lumps: Sequence[_Lump], bound: float, stages: int) -> tuple[int, ...]:
    """The ends of all stages but the last, none of which costs more than the bound."""
    sums = [0.0, *accumulate(cost for _, cost in lumps)]
    least = [0.0] + [inf] * len(lumps)  # of the squares, with the lumps before each in so many stages
    chosen: list[list[int]] = []
    for stage in range(1, stages + 1):
        now, begins = [inf] * (len(lumps) + 1), [0] * (len(lumps) + 1)
        for end in range(stage, len(lumps) + 1):
            for begin in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[begin]
                if cost > bound * (1 + 1e-9):
                    break
                if least[begin] + cost * cost < now[end]:
                    now[end], begins[end] = least[begin] + cost * cost, begin
        least = now
        chosen.append(begins)
    ends, end = [], len(lumps)
    for begins in reversed(chosen[1:]):
        end = begins[end]
        ends.append(lumps[end - 1][0])
    return tuple(reversed(ends))

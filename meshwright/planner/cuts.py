"""Where to cut a model into pipeline stages, so that the slowest stage is as fast as possible.

    slowest(S) = min over cuts of max over stages of the stage's cost                          balanced
    B is at least slowest(S) if filling stages up to a cost of B, from the last piece to the
    first, takes at most S stages                                                              _fill_stages
    of all cuts with that slowest stage, those with the smallest sum of squared costs win      _most_even

Pieces keep their order, and cuts lie only where the model can be cut. The smallest B is found by bisection. The sum of
squares matters if a rank has several stages, because stages of equal cost wait less for each other.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import inf

_HALVINGS = 24


def balanced(costs: Sequence[float], cuttable: Sequence[bool], stages: int) -> tuple[int, ...] | None:
    """Returns the indices of the `stages` - 1 pieces that end a stage other than the last. Returns None if the model
    can be cut at too few places. `costs` are the costs of the pieces, and `cuttable[i]` says whether the model can be
    cut behind piece i."""
    units = _units(costs, cuttable)
    if len(units) < stages:
        return None
    low, high = max(cost for _, cost in units), sum(costs)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if len(_fill_stages(units, middle)) <= stages:
            high = middle
        else:
            low = middle
    return _most_even(units, high, stages)


_Unit = tuple[int, float]  # consecutive pieces between which the model cannot be cut: index of the last, cost of all


def _units(costs: Sequence[float], cuttable: Sequence[bool]) -> list[_Unit]:
    units: list[_Unit] = []
    unit_cost = 0.0
    for piece, cost in enumerate(costs):
        unit_cost += cost
        if cuttable[piece] or piece == len(costs) - 1:
            units.append((piece, unit_cost))
            unit_cost = 0.0
    return units


def _fill_stages(units: Sequence[_Unit], bound: float) -> list[int]:
    """Fills stages from the last unit to the first, each with as many units as the bound on its cost allows. Returns
    the index of the last piece of each stage, in order."""
    ends: list[int] = []
    stage_cost = float("inf")
    for piece, cost in reversed(units):
        if stage_cost + cost > bound * (1 + 1e-9):
            ends.append(piece)
            stage_cost = 0.0
        stage_cost += cost
    return ends[::-1]


def _most_even(units: Sequence[_Unit], bound: float, stages: int) -> tuple[int, ...]:
    """Returns the index of the last piece of every stage but the last. No stage costs more than the bound, and the sum
    of the squared costs of all stages is as small as possible."""
    sums = [0.0, *accumulate(cost for _, cost in units)]
    least = [0.0] + [inf] * len(units)  # least[n]: smallest sum of squares if the first n units fill `stage` stages
    begins_by_stage: list[list[int]] = []
    for stage in range(1, stages + 1):
        squares, begins = [inf] * (len(units) + 1), [0] * (len(units) + 1)
        for end in range(stage, len(units) + 1):
            for begin in range(end - 1, stage - 2, -1):
                cost = sums[end] - sums[begin]
                if cost > bound * (1 + 1e-9):
                    break
                if least[begin] + cost * cost < squares[end]:
                    squares[end], begins[end] = least[begin] + cost * cost, begin
        least = squares
        begins_by_stage.append(begins)
    ends, end = [], len(units)
    for begins in reversed(begins_by_stage[1:]):
        end = begins[end]
        ends.append(units[end - 1][0])
    return tuple(reversed(ends))

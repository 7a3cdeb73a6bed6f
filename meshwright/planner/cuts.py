"""Where to cut a model into pipeline stages, so that the slowest stage is as fast as possible.

    slowest(S) = min over cuts of max over stages of the stage's cost                          balanced
    B is at least slowest(S) if filling stages up to a cost of B, from the last piece to the
    first, takes at most S stages                                                              _fill_stages
    of all cuts with that slowest stage, those with the smallest sum of squared costs win      most_even

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
    cuts = most_even([[0.0, *accumulate(cost for _, cost in units)]], [0] * stages, high)
    assert cuts is not None
    return tuple(units[cut - 1][0] for cut in cuts)


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


def most_even(sums: Sequence[Sequence[float]], stages: Sequence[int], bound: float) -> list[int] | None:
    """The numbers of units before each cut, if no stage costs more than the bound; None if that is not possible. The
    sum of the squared costs of all stages is as small as possible. `sums` has, for each kind of device, the cost of
    everything before each place for a cut, and `stages` the kind of each stage."""
    units = len(sums[0]) - 1
    least = [0.0] + [inf] * units  # least[n]: smallest sum of squares if the first n units fill the stages so far
    begins_by_stage: list[list[int]] = []
    for number, kind in enumerate(stages):
        of_kind, squares, begins = sums[kind], [inf] * (units + 1), [0] * (units + 1)
        for end in range(number + 1, units + 1):
            for begin in range(end - 1, number - 1, -1):
                cost = of_kind[end] - of_kind[begin]
                if cost > bound * (1 + 1e-9):
                    break
                if least[begin] + cost * cost < squares[end]:
                    squares[end], begins[end] = least[begin] + cost * cost, begin
        least = squares
        begins_by_stage.append(begins)
    if least[units] == inf:
        return None
    cuts, end = [], units
    for begins in reversed(begins_by_stage[1:]):
        end = begins[end]
        cuts.append(end)
    return cuts[::-1]

"""Where to cut a model into stages that lie on devices of different speed, so that the slowest stage is as fast as
possible.

    cost        of a stage: Σ seconds of its pieces on the device of the stage
    slowest     min over cuts of max over stages of the cost, by bisection                     balanced_by_speed
    of all cuts with that slowest stage, those with the smallest sum of squared costs win      cuts.py: most_even
"""

from collections.abc import Sequence
from itertools import accumulate

from meshwright.planner.cuts import most_even

_HALVINGS = 16


def balanced_by_speed(
    costs: Sequence[Sequence[float]], cuttable: Sequence[bool], stages: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the indices of the pieces that end a stage other than the last; None if the model can be cut at too few
    places. `costs` has the costs of the pieces on each kind of device, `stages` the kind of each stage, and
    `cuttable[i]` says whether the model can be cut behind piece i."""
    ends = [piece + 1 for piece in range(len(cuttable)) if cuttable[piece] or piece == len(cuttable) - 1]
    if len(ends) < len(stages):
        return None
    all_sums = [[0.0, *accumulate(of_kind)] for of_kind in costs]
    sums = [[of_kind[0], *(of_kind[end] for end in ends)] for of_kind in all_sums]  # up to each place for a cut
    low, high = 0.0, max(of_kind[-1] for of_kind in sums)
    best = most_even(sums, stages, high)
    assert best is not None
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        cuts = most_even(sums, stages, middle)
        if cuts is None:
            low = middle
        else:
            best, high = cuts, middle
    return tuple(ends[unit - 1] - 1 for unit in best)

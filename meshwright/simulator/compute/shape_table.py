"""`ShapeTable`: the measured shapes of one class of operators, and the slowdown of shapes between them. The slowdown is
the measured time divided by the least time that the device's peak rates allow (the roofline, see operator_time.py).

    y(x) = a + b·(x − x0)     fitted around x0 to its nearest shapes, weighted by 1 / distance⁴, with small slopes

x are the logarithms of the sizes and y that of the slowdown; a is the answer. Sizes beyond the smallest or largest
measured size are replaced by that size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp

import numpy as np
import numpy.typing as npt

# How measured shapes are interpolated: the ridge penalty of a slope, where the weights of the shapes add up to one, and
# the square of the distance (in doublings of a size) below which all shapes have about the same weight. These values do
# not depend on the device: `python -m validation.interpolation` predicts each shape of the reference GPU from its other
# shapes, with these values and with smaller and larger ones.
SLOPE_PENALTY = 0.05
NEAREST_SQUARED_DISTANCE = 1e-2


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """The measured shapes of one class of operators. `sizes` has one row per shape, in ascending order, with the
    logarithms to the base of two of its sizes. `slow` has the natural logarithm of each shape's slowdown. `shortest_s`
    is the shortest measured time."""

    sizes: npt.NDArray[np.float64]
    slow: npt.NDArray[np.float64]
    shortest_s: float

    def slowdown(self, sizes: Sequence[float]) -> float:
        """The factor by which an operator of these sizes (logarithms to the base of two) takes longer than the least
        time."""
        return _slowdown(self, tuple(sizes))


@lru_cache(maxsize=65536)
def _slowdown(table: ShapeTable, sizes: tuple[float, ...]) -> float:
    return exp(interpolate(table.sizes, table.slow, sizes, SLOPE_PENALTY, NEAREST_SQUARED_DISTANCE))


def interpolate(
    sizes: npt.NDArray[np.float64],
    values: npt.NDArray[np.float64],
    at: Sequence[float],
    slope_penalty: float,
    nearest_squared_distance: float,
) -> float:
    """The value at the sizes `at`, interpolated between the `values` of the measured `sizes` (one row per shape). If
    shapes have only one size, the value lies on the straight line between the two neighbouring shapes."""
    point = np.clip(np.asarray(at), sizes.min(axis=0), sizes.max(axis=0))
    if len(at) == 1:
        return float(np.interp(point[0], sizes[:, 0], values))
    offsets = sizes - point
    distance = np.square(offsets).sum(axis=1)
    near = np.argsort(distance, kind="stable")[: 2 * len(at) + 2]
    weight = 1.0 / np.square(distance[near] + nearest_squared_distance)
    weight /= weight.sum()
    columns = np.hstack([np.ones((len(near), 1)), offsets[near]])
    penalty = slope_penalty * np.eye(columns.shape[1])
    penalty[0, 0] = 0.0
    coefficients = np.linalg.solve(
        columns.T @ (weight[:, None] * columns) + penalty, columns.T @ (weight * values[near])
    )
    return float(np.clip(coefficients[0], values[near].min(), values[near].max()))

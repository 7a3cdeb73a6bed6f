"""Measured shapes of one class of operators, and the slowdown of shapes between them.

    y(x) = a + b·(x − x0)     fitted around x0 to its nearest shapes, weighted by 1 / distance⁴, with small slopes

in the logarithms of sizes and of measured over least seconds. Beyond the measured sizes the nearest one is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp

import numpy as np
import numpy.typing as npt

# Ridge penalty of a slope, against weights that add up to one. Set by hand, not measured.
_SLOPE_PENALTY = 0.05


@dataclass(frozen=True, eq=False)
class ShapeTable:
    """`sizes` are logarithms to the base of two, one row a shape, in order. `slow` is the natural logarithm of measured
    over least seconds."""

    sizes: npt.NDArray[np.float64]
    slow: npt.NDArray[np.float64]
    shortest_s: float

    def slowdown(self, sizes: Sequence[float]) -> float:
        """How many times the least seconds an operator of these sizes takes."""
        return _slowdown(self, tuple(sizes))


@lru_cache(maxsize=65536)
def _slowdown(table: ShapeTable, sizes: tuple[float, ...]) -> float:
    point = np.clip(np.asarray(sizes), table.sizes.min(axis=0), table.sizes.max(axis=0))
    if len(sizes) == 1:
        return exp(float(np.interp(point[0], table.sizes[:, 0], table.slow)))
    offsets = table.sizes - point
    distance = np.square(offsets).sum(axis=1)
    near = np.argsort(distance, kind="stable")[: 2 * len(sizes) + 2]
    weight = 1.0 / np.square(distance[near] + 1e-2)
    weight /= weight.sum()
    columns = np.hstack([np.ones((len(near), 1)), offsets[near]])
    penalty = _SLOPE_PENALTY * np.eye(columns.shape[1])
    penalty[0, 0] = 0.0
    coefficients = np.linalg.solve(
        columns.T @ (weight[:, None] * columns) + penalty, columns.T @ (weight * table.slow[near])
    )
    return exp(float(np.clip(coefficients[0], table.slow[near].min(), table.slow[near].max())))

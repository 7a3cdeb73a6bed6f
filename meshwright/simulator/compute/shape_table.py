"""Measured shapes of one class of operators, and what lies between them.

    y(x) = a + b·(x − x0)     fitted around x0 to its nearest shapes, weighted by 1 / distance⁴, slopes held small

in the logarithms of sizes and of measured over least seconds. Beyond the measured sizes the last one goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import exp

import numpy as np
import numpy.typing as npt

_STEEP = 0.05  # how much a slope costs, against weights that add up to one


@dataclass(frozen=True, eq=False)
class Table:
    """`sizes` as logarithms to the base of two, one row a shape, in order; `slow` as the natural logarithm of measured
    over least."""

    sizes: npt.NDArray[np.float64]
    slow: npt.NDArray[np.float64]
    shortest_s: float

    def slowdown(self, sizes: Sequence[float]) -> float:
        return _slowdown(self, tuple(sizes))


@lru_cache(maxsize=65536)
def _slowdown(table: Table, sizes: tuple[float, ...]) -> float:
    place = np.clip(np.asarray(sizes), table.sizes.min(axis=0), table.sizes.max(axis=0))
    if len(sizes) == 1:
        return exp(float(np.interp(place[0], table.sizes[:, 0], table.slow)))
    away = table.sizes - place
    distance = np.square(away).sum(axis=1)
    near = np.argsort(distance, kind="stable")[: 2 * len(sizes) + 2]
    weight = 1.0 / np.square(distance[near] + 1e-2)
    weight /= weight.sum()
    columns = np.hstack([np.ones((len(near), 1)), away[near]])
    held = _STEEP * np.eye(columns.shape[1])
    held[0, 0] = 0.0
    found = np.linalg.solve(columns.T @ (weight[:, None] * columns) + held, columns.T @ (weight * table.slow[near]))
    return exp(float(np.clip(found[0], table.slow[near].min(), table.slow[near].max())))

"""How well the measured shapes of the reference GPU predict each other: `python -m validation.interpolation`.

Every shape is left out in turn and predicted from the others of its class, direction, dtype and layout, as
simulator/compute/shape_table.py interpolates between them. The median error is printed for the constants of that file
and of lookup.py, and with one of them a few times smaller and larger: the less it changes, the less depends on them.
"""

from collections.abc import Callable, Iterable, Iterator
from statistics import median

import numpy as np
import numpy.typing as npt

from meshwright.simulator.compute.lookup import FILTER_DISTANCE, GROUPED_DISTANCE, STRIDE_DISTANCE, UNALIGNED_DISTANCE
from meshwright.simulator.compute.operator_time import reference_gpu, shape_tables
from meshwright.simulator.compute.shape_table import (
    NEAREST_SQUARED_DISTANCE,
    SLOPE_PENALTY,
    ShapeTable,
    interpolate,
)

_FACTORS = (0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 10.0)
_FEWEST_SHAPES = 8  # of a table whose shapes are predicted
# The columns of a convolution's sizes that are multiplied by a constant.
_CONVOLUTION_COLUMNS = {"FILTER_DISTANCE": 3, "STRIDE_DISTANCE": 4, "GROUPED_DISTANCE": 5, "UNALIGNED_DISTANCE": 6}
_CONVOLUTION_VALUES = (FILTER_DISTANCE, STRIDE_DISTANCE, GROUPED_DISTANCE, UNALIGNED_DISTANCE)


def left_out_errors(
    table: ShapeTable, sizes: npt.NDArray[np.float64], slope_penalty: float, nearest_squared_distance: float
) -> Iterator[float]:
    """The relative error of each shape's predicted time, where `sizes` replace those of the table."""
    for number, point in enumerate(sizes):
        others = np.arange(len(sizes)) != number
        predicted = interpolate(
            sizes[others], table.slow[others], tuple(point), slope_penalty, nearest_squared_distance
        )
        yield float(abs(np.expm1(predicted - table.slow[number])))


def main() -> None:
    measured, _ = reference_gpu()
    # Tables with one size are interpolated between two neighbours, without these constants.
    tables = {
        key: table
        for key, table in shape_tables(measured).items()
        if len(table.slow) >= _FEWEST_SHAPES and table.sizes.shape[1] > 1
    }
    convolutions = [table for (name, *_), table in tables.items() if name == "convolution"]

    def with_penalty(factor: float) -> float:
        return _median_error(tables.values(), lambda t: t.sizes, factor * SLOPE_PENALTY, NEAREST_SQUARED_DISTANCE)

    def with_distance(factor: float) -> float:
        return _median_error(tables.values(), lambda t: t.sizes, SLOPE_PENALTY, factor * NEAREST_SQUARED_DISTANCE)

    _print_row("SLOPE_PENALTY", SLOPE_PENALTY, with_penalty)
    _print_row("NEAREST_SQUARED_DISTANCE", NEAREST_SQUARED_DISTANCE, with_distance)
    for (name, column), value in zip(_CONVOLUTION_COLUMNS.items(), _CONVOLUTION_VALUES, strict=True):

        def with_column(factor: float, column: int = column) -> float:
            return _median_error(
                convolutions, lambda t: _scaled(t.sizes, column, factor), SLOPE_PENALTY, NEAREST_SQUARED_DISTANCE
            )

        _print_row(name, value, with_column)


def _median_error(
    tables: Iterable[ShapeTable],
    sizes_of: Callable[[ShapeTable], npt.NDArray[np.float64]],
    penalty: float,
    distance: float,
) -> float:
    errors = [error for table in tables for error in left_out_errors(table, sizes_of(table), penalty, distance)]
    return median(errors)


def _scaled(sizes: npt.NDArray[np.float64], column: int, factor: float) -> npt.NDArray[np.float64]:
    factors = np.ones(sizes.shape[1])
    factors[column] = factor
    return sizes * factors


def _print_row(name: str, value: float, error_with: Callable[[float], float]) -> None:
    errors = "  ".join(f"{factor * value:g}: {error_with(factor):.2%}" for factor in _FACTORS)
    print(f"{name:25} {errors}", flush=True)


if __name__ == "__main__":
    main()

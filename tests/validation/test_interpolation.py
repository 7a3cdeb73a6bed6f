"""What `python -m validation.interpolation` prints comes from shapes that are predicted from their neighbours."""

from itertools import product

import numpy as np
import pytest

from meshwright.simulator.compute.shape_table import NEAREST_SQUARED_DISTANCE, ShapeTable
from validation.interpolation import left_out_errors


def test_shapes_on_a_plane_are_predicted_from_the_others_unless_slopes_are_penalized() -> None:
    sizes = np.array(list(product(range(5), repeat=2)), dtype=np.float64)
    table = ShapeTable(sizes, 0.1 * sizes.sum(axis=1), shortest_s=0.0)
    inner = [number for number, size in enumerate(sizes) if size.min() > 0 and size.max() < 4]
    exact = list(left_out_errors(table, sizes, 1e-9, NEAREST_SQUARED_DISTANCE))
    assert [exact[number] for number in inner] == pytest.approx([0.0] * len(inner), abs=1e-6)
    penalized = list(left_out_errors(table, sizes, 10.0, NEAREST_SQUARED_DISTANCE))
    assert sum(penalized) > sum(exact)

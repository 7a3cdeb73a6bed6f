"""What rounding can change is allowed, and what it cannot is not, for elements and for rows."""

import torch
from torch import Tensor

from meshwright.audit.rounding import Rounding, drift_factor, eps_of, row_shares, weight_bounds

BF16, FP32 = torch.finfo(torch.bfloat16).eps, torch.finfo(torch.float32).eps


def _gradient(rows: int = 16, columns: int = 64) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _rounded(value: Tensor, share: float, seed: int) -> Tensor:
    draw = torch.randn(value.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return value * (1 + share * draw)


def test_other_roundings_of_the_same_size_are_allowed() -> None:
    expected = _gradient()
    bounds = Rounding(BF16).element_bounds(expected, _rounded(expected, 0.005, 1))
    assert bool(((_rounded(expected, 0.005, 2) - expected).abs() <= bounds).all())


def test_a_row_that_is_a_tenth_too_long_is_found_in_bf16() -> None:
    expected = _gradient()
    noise, candidate = _rounded(expected, 0.01, 1), _rounded(expected, 0.01, 2)
    row_bounds = Rounding(BF16).row_bounds(expected, noise)
    assert bool((row_shares(candidate, expected).abs() <= row_bounds).all())
    candidate[3] *= 1.1
    assert (row_shares(candidate, expected).abs() > row_bounds).nonzero().flatten().tolist() == [3]


def test_a_small_row_beside_large_ones_is_compared_with_itself() -> None:
    expected = _gradient()
    expected[5] *= 1e-3
    bounds = Rounding(FP32).element_bounds(expected, _rounded(expected, 1e-7, 1))
    candidate = expected.clone()
    candidate[5] *= 1.01
    rows = ((candidate - expected).abs() > bounds).any(1)
    assert rows.nonzero().flatten().tolist() == [5]


def test_a_gradient_that_is_rounding_only_has_no_row_bound() -> None:
    expected = _gradient()
    expected[2] = 1e-9 * expected[2]
    noise = expected.clone()
    noise[2] = -expected[2]
    row_bounds = Rounding(FP32).row_bounds(expected, noise)
    assert row_bounds.isinf().nonzero().flatten().tolist() == [2]


def test_weights_may_differ_where_the_sign_of_a_gradient_is_rounding() -> None:
    change = torch.tensor([1e-3, -1e-3, 1e-3], dtype=torch.float64)
    bounds = weight_bounds(change, torch.full((3,), 1e-9, dtype=torch.float64), torch.tensor([10.0, 1e-4, 1e-4]))
    assert float(bounds[0]) > 2e-3 - 1e-9
    assert float(bounds[1]) < 1e-5


def test_the_shortest_type_and_the_drift_count() -> None:
    assert eps_of({"float32", "bfloat16"}) == BF16
    assert eps_of({"float32", "int64"}) == FP32
    assert drift_factor(3e-6, 1e-6) == 3.0
    assert drift_factor(1e-7, 1e-6) == 1.0
    assert drift_factor(1e-7, 0.0) == 1.0

"""What an error is measured by, and which difference is named as the first."""

import math

import pytest
import torch

from meshwright.proof.compare.errors import Comparison, layer_scales, scaled_error, weight_drift


def test_a_tensor_is_measured_against_its_layer() -> None:
    scales = layer_scales(
        {"conv.weight": torch.tensor([-4.0, 1.0]), "conv.bias": torch.tensor([1e-17]), "head": torch.tensor(2.0)}
    )
    assert scales == {"conv.weight": 4.0, "conv.bias": 4.0, "head": 2.0}


def test_a_layer_whose_gradient_cancelled_is_measured_against_the_model() -> None:
    gradients = {"a.weight": torch.tensor([10.0]), "b.weight": torch.tensor([1e-12])}
    assert layer_scales(gradients, 1e-3) == {"a.weight": 10.0, "b.weight": 1e-2}


@pytest.mark.parametrize(
    ("actual", "expected", "scale", "error"),
    [
        ([1.0, 2.5], [1.0, 2.0], 4.0, 0.125),
        ([1.0], [1.0], 0.0, 0.0),
        ([1.0], [2.0], 0.0, math.inf),
        ([math.nan], [1.0], 1.0, math.inf),
        ([math.nan], [math.nan], 1.0, 0.0),
        ([1.0, 1.0], [1.0], 1.0, math.inf),
        (None, [0.0, 0.0], 1.0, 0.0),
        (None, [0.0, 3.0], 6.0, 0.5),
        ([0.5], None, 1.0, 0.5),
        (None, None, 0.0, 0.0),
    ],
)
def test_errors_are_scaled_differences(
    actual: list[float] | None, expected: list[float] | None, scale: float, error: float
) -> None:
    actual_tensor = None if actual is None else torch.tensor(actual)
    expected_tensor = None if expected is None else torch.tensor(expected)
    assert scaled_error(actual_tensor, expected_tensor, scale) == error


def test_integers_are_equal_or_infinitely_wrong() -> None:
    assert scaled_error(torch.tensor(3), torch.tensor(3), 1.0) == 0
    assert scaled_error(torch.tensor(3), torch.tensor(4), 1e9) == math.inf


def test_each_element_may_have_its_own_scale() -> None:
    actual, expected = torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.0 + 2**-10])
    assert scaled_error(actual, expected, torch.tensor([100.0, 1.0])) == 0.005


def test_the_first_difference_is_named_and_the_largest_error_is_kept() -> None:
    comparison = Comparison().with_tolerance(1e-3).with_error(1, "loss", None, 1e-4)
    comparison = comparison.with_error(1, "gradient", "b", 2e-3).with_error(1, "gradient", "a", 0.5)
    first = comparison.first_difference
    assert first is not None
    assert (first.parameter, first.error) == ("b", 2e-3)
    assert (comparison.largest_error, comparison.losses, comparison.gradients) == (0.5, 1, 2)


def test_a_difference_in_the_loss_names_the_first_gradient_that_differs_with_it() -> None:
    comparison = Comparison().with_tolerance(1e-3).with_error(2, "loss", None, 0.1)
    comparison = comparison.with_error(2, "gradient", "b", 0).with_error(2, "gradient", "a", 1)
    first = comparison.first_difference
    assert first is not None
    assert (first.what, first.parameter, first.error) == ("loss", "a", 0.1)


def test_a_nan_is_a_difference() -> None:
    assert Comparison().with_tolerance(1.0).with_error(1, "loss", None, math.nan).first_difference is not None


def test_drift_is_that_of_the_layer_that_drifted_most() -> None:
    weights = {"a.weight": torch.ones(4), "b.weight": torch.full((4,), 100.0), "b.bias": torch.zeros(1)}
    moved = {"a.weight": torch.ones(4), "b.weight": torch.full((4,), 101.0), "b.bias": torch.zeros(1)}
    assert weight_drift(moved, weights) == pytest.approx(0.01)

"""Against what a difference is measured, and which one is told."""

import math

import pytest
import torch

from meshwright.proof.compare.errors import Comparison, drift_of, error_of, layer_scales


def test_a_tensor_is_measured_against_its_layer() -> None:
    scales = layer_scales(
        {"conv.weight": torch.tensor([-4.0, 1.0]), "conv.bias": torch.tensor([1e-17]), "head": torch.tensor(2.0)}
    )
    assert scales == {"conv.weight": 4.0, "conv.bias": 4.0, "head": 2.0}


def test_a_layer_whose_gradient_cancelled_is_measured_against_the_model() -> None:
    gradients = {"a.weight": torch.tensor([10.0]), "b.weight": torch.tensor([1e-12])}
    assert layer_scales(gradients, 1e-3) == {"a.weight": 10.0, "b.weight": 1e-2}


@pytest.mark.parametrize(
    ("found", "expected", "unit", "error"),
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
def test_errors(found: list[float] | None, expected: list[float] | None, unit: float, error: float) -> None:
    first = None if found is None else torch.tensor(found)
    second = None if expected is None else torch.tensor(expected)
    assert error_of(first, second, unit) == error


def test_counters_are_equal_or_wrong() -> None:
    assert error_of(torch.tensor(3), torch.tensor(3), 1.0) == 0
    assert error_of(torch.tensor(3), torch.tensor(4), 1e9) == math.inf


def test_each_element_may_have_a_unit_of_its_own() -> None:
    found, expected = torch.tensor([1.0, 1.0]), torch.tensor([1.5, 1.0 + 2**-10])
    assert error_of(found, expected, torch.tensor([100.0, 1.0])) == 0.005


def test_the_first_difference_is_told_and_the_worst_error_is_kept() -> None:
    seen = Comparison().within(1e-3).seen(1, "loss", None, 1e-4).seen(1, "gradient", "b", 2e-3)
    seen = seen.seen(1, "gradient", "a", 0.5)
    assert seen.first is not None
    assert (seen.first.parameter, seen.first.error) == ("b", 2e-3)
    assert (seen.worst, seen.losses, seen.gradients) == (0.5, 1, 2)


def test_a_difference_in_the_loss_names_the_first_gradient_that_differs_with_it() -> None:
    seen = Comparison().within(1e-3).seen(2, "loss", None, 0.1).seen(2, "gradient", "b", 0).seen(2, "gradient", "a", 1)
    assert seen.first is not None
    assert (seen.first.what, seen.first.parameter, seen.first.error) == ("loss", "a", 0.1)


def test_what_is_not_a_number_is_a_difference() -> None:
    assert Comparison().within(1.0).seen(1, "loss", None, math.nan).first is not None


def test_drift_is_that_of_the_layer_that_drifted_most() -> None:
    weights = {"a.weight": torch.ones(4), "b.weight": torch.full((4,), 100.0), "b.bias": torch.zeros(1)}
    moved = {"a.weight": torch.ones(4), "b.weight": torch.full((4,), 101.0), "b.bias": torch.zeros(1)}
    assert drift_of(moved, weights) == pytest.approx(0.01)

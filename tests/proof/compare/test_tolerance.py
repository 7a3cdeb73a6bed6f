"""Tolerances follow from precision, reduction length and depth, and from what the optimizer does to an error."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.proof.compare.tolerance import PerturbedTraining, SumTolerance, count_reductions
from meshwright.proof.reference.reference import PlainTraining
from meshwright.proof.reference.reference_setup import build_setup
from tests.proof.cases import OPTIMIZERS, proof_request


def test_the_longest_sum_and_the_layers_are_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5))
    with count_reductions(model) as counter:
        for _ in range(2):
            model(torch.randn(10, 3, 6, 6))
    tolerance = counter.tolerance(2, torch.float64)
    assert tolerance.depth == 2
    assert tolerance.terms == 2 * 10 * 16 + 4 * 16, "positions of both passes, and the fan-in of the linear layer"


def test_the_tolerance_grows_with_terms_depth_drift_and_eps() -> None:
    small = SumTolerance(100, 2, torch.float64)
    assert small.first_step == pytest.approx(2 * 2 * 10 * 10 * 2.22e-16, rel=1e-2)
    assert SumTolerance(400, 2, torch.float64).first_step == pytest.approx(2 * small.first_step)
    assert SumTolerance(100, 4, torch.float64).first_step == pytest.approx(2 * small.first_step)
    assert small.with_drift(1e-12) == pytest.approx(small.first_step + 4e-12)
    assert SumTolerance(100, 2, torch.float32).first_step > 1e8 * small.first_step
    # In the largest model that fp64 must tell from an error of a millionth: GPT-3's depth, four million tokens.
    assert SumTolerance(4_000_000, 96 * 8, torch.float64).first_step < 1e-7


def weight_bounds(optimizer: str, gradients: list[float], perturbation: float, steps: int = 1) -> list[float]:
    """How far weights of 1 may move if each gradient may be wrong by `perturbation`."""

    def ones() -> nn.Linear:
        linear = nn.Linear(len(gradients), 1, bias=False).double()
        nn.init.ones_(linear.weight)
        return linear

    setup = replace(
        build_setup(proof_request()),
        make_optimizer=lambda parameters: OPTIMIZERS[optimizer](parameters.values()),
        make_schedule=None,
    )
    plain = PlainTraining(replace(setup, model=ones()), torch.device("cpu"))
    perturbed = PerturbedTraining(replace(setup, model=ones()), torch.device("cpu"))
    for _ in range(steps):
        plain.model.get_parameter("weight").grad = torch.tensor([gradients]).double()
        perturbed.take_perturbed_gradients(plain.model, {"weight": perturbation})
        plain.update(last_of_epoch=False)
        perturbed.update(last_of_epoch=False)
    bounds: list[float] = perturbed.weight_bounds(plain.model)["weight"][0].tolist()
    return bounds


def test_a_linear_optimizer_scales_an_error_by_its_learning_rate() -> None:
    assert weight_bounds("sgd", [1.0, -1.0, 0.0], 1e-6) == pytest.approx(
        [2 * 0.19e-6] * 3, rel=1e-3
    )  # nesterov: 0.1 × 1.9


def test_adam_enlarges_only_errors_of_gradients_near_zero() -> None:
    far, near = weight_bounds("adamw", [1.0, 1e-9], 1e-7)
    assert far < 1e-12
    assert near > 1e-3, "the sign of this gradient, and with it a whole step of 0.01, is decided by rounding"


def test_bounds_grow_with_the_steps() -> None:
    once, often = weight_bounds("sgd", [1.0], 1e-6)[0], weight_bounds("sgd", [1.0], 1e-6, steps=3)[0]
    assert often > 3 * once

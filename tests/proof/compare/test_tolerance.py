"""Tolerances follow from precision, reduction length and depth, and from what the optimizer does."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.proof.compare.tolerance import Shadow, Sizes, counted
from meshwright.proof.reference.reference import Trained
from meshwright.proof.reference.setting import set_up
from tests.proof.cases import OPTIMIZERS, question


def test_the_longest_sum_and_the_layers_are_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 16, 5))
    with counted(model) as count:
        for _ in range(2):
            model(torch.randn(10, 3, 6, 6))
    sizes = count.sizes(2, torch.float64)
    assert sizes.depth == 2
    assert sizes.terms == 2 * 10 * 16 + 4 * 16, "positions of both passes, and the fan-in of the linear layer"


def test_the_tolerance_grows_with_terms_depth_drift_and_eps() -> None:
    small = Sizes(100, 2, torch.float64)
    assert small.tolerance == pytest.approx(2 * 2 * 10 * 10 * 2.22e-16, rel=1e-2)
    assert Sizes(400, 2, torch.float64).tolerance == pytest.approx(2 * small.tolerance)
    assert Sizes(100, 4, torch.float64).tolerance == pytest.approx(2 * small.tolerance)
    assert small.after(1e-12) == pytest.approx(small.tolerance + 4e-12)
    assert Sizes(100, 2, torch.float32).tolerance > 1e8 * small.tolerance
    # The largest that fp64 is asked to tell from an error of a millionth: GPT-3's depth, four million tokens.
    assert Sizes(4_000_000, 96 * 8, torch.float64).tolerance < 1e-7


def carried(optimizer: str, gradients: list[float], off: float, steps: int = 1) -> list[float]:
    """How far weights of 1 are carried by gradients that are `off`."""

    def ones() -> nn.Linear:
        made = nn.Linear(len(gradients), 1, bias=False).double()
        nn.init.ones_(made.weight)
        return made

    setting = replace(
        set_up(question()),
        make_optimizer=lambda held: OPTIMIZERS[optimizer](held.values()),
        make_schedule=None,
    )
    plain = Trained(replace(setting, model=ones()), torch.device("cpu"))
    shadow = Shadow(replace(setting, model=ones()), torch.device("cpu"))
    for _ in range(steps):
        plain.model.get_parameter("weight").grad = torch.tensor([gradients]).double()
        shadow.follow(plain.model, {"weight": off})
        plain.update(last_of_epoch=False)
        shadow.update(last_of_epoch=False)
    found: list[float] = shadow.carried(plain.model)["weight"][0].tolist()
    return found


def test_an_optimizer_that_is_linear_carries_a_difference_as_far_as_its_rate() -> None:
    assert carried("sgd", [1.0, -1.0, 0.0], 1e-6) == pytest.approx([2 * 0.19e-6] * 3, rel=1e-3)  # nesterov: 0.1 × 1.9


def test_adam_carries_far_only_what_lies_near_zero() -> None:
    far, near = carried("adamw", [1.0, 1e-9], 1e-7)
    assert far < 1e-12
    assert near > 1e-3, "the sign of this gradient, and with it a whole step of 0.01, is decided by rounding"


def test_what_was_carried_off_stays_off() -> None:
    once, often = carried("sgd", [1.0], 1e-6)[0], carried("sgd", [1.0], 1e-6, steps=3)[0]
    assert often > 3 * once

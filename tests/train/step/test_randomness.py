"""Generators are seeded for each step and restored afterwards, at little cost where nothing draws."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.train.session import Session
from meshwright.train.step.randomness import StepGenerators
from tests.ranks import RankPool
from tests.train.one_process import world

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(1))


def test_a_step_draws_by_its_seed_and_leaves_the_generators_as_they_were() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    untouched = draw()
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    generators, drawn = StepGenerators(CPU), []
    for step in (5, 6, 5):
        with generators.seeded(step):
            drawn.append(draw())
    assert drawn[0] == drawn[2] != drawn[1]
    assert draw() == untouched


@pytest.mark.parametrize("draw_one", [random.random, np.random.rand])
def test_generators_that_nothing_draws_from_are_no_longer_seeded_until_something_does(
    monkeypatch: pytest.MonkeyPatch, draw_one: Callable[[], float]
) -> None:
    generators, seeds, seed = StepGenerators(CPU), [], np.random.seed

    def count(value: int) -> None:
        seeds.append(value)
        seed(value)

    monkeypatch.setattr(np.random, "seed", count)
    for step in range(100):
        with generators.seeded(step):
            torch.rand(1)
    assert len(seeds) == 20, "the steps after the first ones do not seed NumPy"
    for step in range(100, 170):  # one of 64 steps is checked
        with generators.seeded(step):
            draw_one()
    drawn = []
    for _ in range(2):
        with generators.seeded(7):
            drawn.append(draw_one())
    assert drawn[0] == drawn[1]


def always_seeds(rank: int, size: int) -> bool:
    session = Session(
        nn.Linear(2, 2),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
        loss=nn.MSELoss(),
        plan=Plan.model_validate({"axes": {"replicate": size}}),
        world=world(rank, size),
    )
    return session.generators.always_seeds


def test_several_ranks_seed_all_generators_in_every_step(two: RankPool) -> None:
    assert two.run(always_seeds) == [True, True]
    assert not always_seeds(0, 1)


def test_a_recorded_session_seeds_all_generators_in_every_step() -> None:
    generators, drawn = StepGenerators(CPU, always_seeds=True), []
    for step in range(40):
        with generators.seeded(step):
            pass
    for _ in range(2):
        with generators.seeded(3):
            drawn.append(draw())
    assert drawn[0] == drawn[1]

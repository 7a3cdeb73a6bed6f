"""Tests which state of a model is found to follow its batches."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from meshwright.proof.before_training.batch_state import find_batch_state, find_changed_parameter
from tests.proof.before_training.models import Blocks, FollowsBatch, training


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (FollowsBatch("buffer"), "center"),
        (FollowsBatch("attribute"), "mean"),
        (FollowsBatch("neither"), None),
        (Blocks(), None),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(8, 3)), None),
    ],
)
def test_state_that_follows_the_samples_is_named(model: nn.Module, name: str | None) -> None:
    before = deepcopy(model.state_dict())
    found = find_batch_state(training(model))
    assert (str(found) if found else None) == name
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


class Decaying(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(8, 3), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.scale.mul_(0.9)
        y: torch.Tensor = self.layer(x) * self.scale
        return y


def test_a_parameter_that_a_forward_pass_writes_is_named() -> None:
    assert str(find_changed_parameter(training(Decaying()))) == "scale"
    assert find_changed_parameter(training(Blocks())) is None
    assert find_batch_state(training(Decaying())) is None, "each rank writes the same"


def test_the_module_of_the_state_is_named() -> None:
    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FollowsBatch()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.inner(x)
            return y

    assert str(find_batch_state(training(Inside()))) == "inner.center"

"""Tests which models are found to mix the samples of a batch, and that nothing is changed by looking."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.errors import InputError, MixedSamples
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.proof.before_training.mixing.find import Mixing, find_mixing
from meshwright.proof.before_training.plan_kind import UnequalDivisions
from meshwright.proof.before_training.training import Training
from tests.proof.before_training.mixing import models
from tests.proof.before_training.mixing.models import IN_BACKWARD, INDEPENDENT, MIXING, WIDTH, Model


def mixing(model: nn.Module, samples: int = 8, loss: Any = F.cross_entropy) -> Mixing | None:
    generator = torch.Generator().manual_seed(0)
    batch = torch.randn(samples, WIDTH, generator=generator), torch.randint(3, (samples,), generator=generator)
    training = Training(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, batch)
    return find_mixing(training, torch.device("cpu"))


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("kind", MIXING)
def test_a_model_that_mixes_samples_is_found(kind: str, samples: int) -> None:
    found = mixing(Model(MIXING[kind]), samples)
    assert found is not None
    if kind not in ("random numbers", "vmap"):  # no line is searched or found with these
        assert found.module == "inner"
        assert models.__file__ in found.line


@pytest.mark.parametrize("kind", IN_BACKWARD)
def test_a_backward_pass_that_mixes_or_is_not_linear_is_found(kind: str) -> None:
    found = mixing(Model(IN_BACKWARD[kind]))
    assert found is not None
    assert found.in_backward
    if kind != "detached mean":  # neither a hook nor a custom function does it
        assert models.__file__ in found.line


class OwnLoss(Model):
    """Returns its loss, which has no dimension of samples."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.cross_entropy(super().forward(x), target)


def test_a_hook_that_is_not_linear_is_found_in_a_model_that_returns_its_loss() -> None:
    for kind in ("hook normalizes each sample", "hook clips large gradients", "hook divides by the norm"):
        found = mixing(OwnLoss(IN_BACKWARD[kind]), loss=None)
        assert found is not None
        assert found.in_backward
        assert models.__file__ in found.line
    assert mixing(OwnLoss(INDEPENDENT["linear hook"]), loss=None) is None


@pytest.mark.parametrize("samples", [1, 8])
@pytest.mark.parametrize("kind", INDEPENDENT)
def test_a_model_that_treats_each_sample_by_itself_is_not(kind: str, samples: int) -> None:
    assert mixing(Model(INDEPENDENT[kind]), samples) is None


def test_the_line_is_that_of_the_write() -> None:
    found = mixing(Model(MIXING["write"]))
    assert found is not None
    number = int(found.line.rpartition(" ")[2])
    with open(models.__file__) as file:
        assert "x.view(-1)[3] = 0" in file.readlines()[number - 1]


@pytest.mark.parametrize(
    "returns",
    [
        lambda y: {"scores": y, "similar": y @ y.T},  # as CLIP does
        lambda y: (y, [y.mean(), {"loss": y.square().mean()}]),
        lambda y: y.reshape(-1),
        lambda y: y.t(),
        lambda y: y.t().reshape(-1),
    ],
)
def test_outputs_of_other_forms_are_no_mixture(returns: Any) -> None:
    assert mixing(Model(INDEPENDENT["pointwise"], returns)) is None
    assert mixing(Model(MIXING["mean"], returns)) is not None


@pytest.mark.parametrize(
    ("number", "is_found"),
    [
        (lambda y: y.square().mean().sqrt(), True),
        (lambda y: y.square().sum(), True),
        (lambda y: y.square().mean(), False),
        (lambda y: y.sum() * 0 + 3, False),
    ],
)
def test_a_number_that_the_loss_uses_must_be_a_mean_over_samples(number: Any, is_found: bool) -> None:
    model = Model(INDEPENDENT["pointwise"], lambda y: (y, number(y)))
    found = mixing(model, loss=lambda output, target: F.cross_entropy(output[0], target) + output[1])
    assert (found is not None) is is_found
    assert found is None or found.in_number
    assert mixing(model, loss=lambda output, target: F.cross_entropy(output[0], target)) is None


def test_the_model_and_the_generators_stay_as_they_were() -> None:
    model = Model(MIXING["mean"])
    model.head.eval()
    before, state = deepcopy(model.state_dict()), torch.get_rng_state()
    assert mixing(model) is not None
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.head.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_search_leaves_out_plans_that_divide_batches_only() -> None:
    unequal = UnequalDivisions()
    unequal.add(Plan(axes=Axes(tensor=2, replicate=2)), MixedSamples("mixed"))
    unequal(Plan(axes=Axes(tensor=4)))
    for axes in (Axes(replicate=4), Axes(shard=4), Axes(tensor=2, shard=2)):
        with pytest.raises(InputError, match="samples the model mixes"):
            unequal(Plan(axes=axes))

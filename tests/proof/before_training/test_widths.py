"""Tests how wide layers are made narrow: what is cut, and that a model which cannot be cut stays as it is."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.plan import Plan
from meshwright.proof.before_training.decide import decide
from meshwright.proof.before_training.reduction import Reduction, parameter_count, reduced_training
from meshwright.proof.before_training.training import Training
from meshwright.proof.before_training.widths import narrow_widths, wide_sizes

TENSOR = Plan.model_validate({"axes": {"tensor": 2}})


class Pictures(nn.Module):
    """A convolution, wide layers with a shared weight and a buffer, and a norm that knows its size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 256, 3, stride=2)
        self.wide, self.again = nn.Linear(256 * 4, 512), nn.Linear(256 * 4, 512)
        self.again.weight = self.wide.weight
        self.norm = nn.LayerNorm(512)
        self.last = nn.Linear(512, 3)
        self.register_buffer("scale", torch.ones(512))

    def forward(self, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(self.first(x), 2).flatten(1)
        return self.last(self.norm(self.scale * self.wide(x) + self.again(x)))


def training_of(model: nn.Module) -> Training:
    batch = torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, batch)


def test_equal_sizes_stay_equal_and_weights_tied() -> None:
    model = Pictures()
    assert wide_sizes(model) == [512, 1024, 256]
    narrow_widths(model, {512: 64})
    assert model.wide.weight is model.again.weight
    assert model.wide.weight.shape == (64, 1024)
    assert (model.wide.out_features, model.norm.normalized_shape, model.scale.shape) == (64, (64,), (64,))
    assert model(torch.randn(2, 3, 16, 16)).shape == (2, 3)


def test_the_number_of_weights_of_a_narrow_model_is_known() -> None:
    reduction = Reduction(widths={512: 64, 1024: 64})
    assert parameter_count(Pictures(), Reduction(widths={512: 64})) == parameter_count(
        reduced_training(training_of(Pictures()), Reduction(widths={512: 64})).model
    )
    assert parameter_count(Pictures(), reduction) < parameter_count(Pictures())


def test_only_sizes_with_which_the_model_runs_are_changed() -> None:
    from meshwright.proof.before_training import decide as module

    # 1,024 is 4 times 256 in the code of the model: neither can be changed without the other.
    assert module._narrower_widths(training_of(Pictures()), Reduction()) == {512: 64}


def test_a_large_model_is_checked_with_narrow_layers() -> None:
    model = Pictures()
    model.wide, model.again = nn.Linear(1024, 30_000), nn.Linear(1024, 30_000)
    model.norm, model.last = nn.LayerNorm(30_000), nn.Linear(30_000, 3)
    model.scale = torch.ones(30_000)
    decision = decide(training_of(model), TENSOR, torch.device("cpu"))
    assert decision.problem is None
    assert decision.reduction.widths == {30_000: 64}
    assert Reduction.from_plain(decision.reduction.to_plain()) == decision.reduction

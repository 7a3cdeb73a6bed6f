"""Initial weights are a function of (seed, parameter name): of nothing else."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.parallel.weights.initialize import initialize_model
from tests.train.one_process import equal_states


class ManyLayers(nn.Module):
    """Layers of many kinds, built in a given order; with `more`, another layer is built before each."""

    def __init__(self, order: str, more: bool = False) -> None:
        super().__init__()
        for letter in order:
            if more:
                setattr(self, f"more_{letter}", nn.Linear(5, 5))
            setattr(self, letter, self.make(letter))

    def make(self, letter: str) -> nn.Module:
        kinds = {
            "a": lambda: nn.Linear(4, 4),
            "b": lambda: nn.Conv2d(2, 3, 3),
            "c": lambda: nn.LSTM(3, 3),
            "d": lambda: nn.Embedding(5, 3, padding_idx=1),
            "e": lambda: nn.MultiheadAttention(4, 2),
            "f": lambda: _custom_layer(),
            "g": lambda: nn.TransformerEncoderLayer(4, 2, 8),
            "h": lambda: nn.BatchNorm1d(3),
        }
        return kinds[letter]()


def _custom_layer() -> nn.Module:
    """Initializes a weight twice, and has a parameter from `randn` and a random buffer."""
    module = nn.Linear(4, 4)
    nn.init.trunc_normal_(module.weight, std=0.02)
    nn.init.kaiming_normal_(module.weight)
    with torch.no_grad():
        module.weight.mul_(0.5)
    module.scale = nn.Parameter(torch.randn(7))
    module.register_buffer("noise", torch.rand(3))
    return module


def state(order: str, seed: int = 0, more: bool = False) -> dict[str, Tensor]:
    return initialize_model(lambda: ManyLayers(order, more), seed).state_dict()


def test_the_order_of_building_does_not_matter() -> None:
    assert equal_states(dict(sorted(state("abcdefgh").items())), dict(sorted(state("hgfedcba").items())))


def test_adding_layers_leaves_the_others_as_they_were() -> None:
    less, more = state("abcdefgh"), state("abcdefgh", more=True)
    assert more.keys() > less.keys()
    assert all(torch.equal(more[name], value) for name, value in less.items())


def test_weights_depend_on_the_seed_and_on_the_name() -> None:
    first, second = state("ad", seed=0), state("ad", seed=1)
    assert not torch.equal(first["a.weight"], second["a.weight"])
    assert not torch.equal(first["d.weight"], second["d.weight"])
    pair = initialize_model(lambda: nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)]), 0).state_dict()
    assert not torch.equal(pair["0.weight"], pair["1.weight"])


def test_weights_have_the_distributions_that_the_model_chose() -> None:
    """Operators that follow the random fill are applied too."""
    model = initialize_model(lambda: ManyLayers("df"), 0)
    embedding, custom = model.get_submodule("d"), model.get_submodule("f")
    assert not embedding.get_parameter("weight")[1].any(), "the row of the padding index stays zero"
    wide = initialize_model(lambda: nn.Linear(400, 400), 0).get_parameter("weight")
    assert float(wide.detach().abs().max()) == pytest.approx(0.05, rel=0.01)
    assert float(wide.detach().std()) == pytest.approx(0.05 / 3**0.5, rel=0.02)
    assert float(custom.get_parameter("weight").detach().std()) < 1
    assert not torch.equal(custom.get_parameter("scale"), torch.zeros(7))


def test_tied_weights_stay_tied_and_constants_constant() -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.LayerNorm(3))
        model[1].weight = model[0].weight
        return model

    model = initialize_model(build, 0)
    assert model.get_parameter("0.weight") is model.get_submodule("1").weight
    assert torch.equal(model.get_parameter("2.weight"), torch.ones(3))


def test_the_callers_random_generator_is_not_changed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    state("abc")
    assert torch.equal(torch.rand(3), expected)

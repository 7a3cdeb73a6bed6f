"""Linear layers in 8 bits, emulated: which are taken, and that they compute forward and backward."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.float8 import eight_bits
from meshwright.workloads.text.decoder_sizes import decoder

pytest.importorskip("torchao", reason="8 bits are torchao's")

CPU = torch.device("cpu")


def test_layers_that_fit_are_replaced_and_tied_ones_stay() -> None:
    model = decoder("gpt2", layers=1, hidden=32, heads=2, vocabulary=64, sequence=8)
    names = list(model.state_dict())
    eight_bits(model, CPU, emulate=True)
    taken = {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"}
    layers = ("attention.q", "attention.k", "attention.v", "attention.o", "feedforward.up", "feedforward.down")
    assert taken == {f"blocks.0.{name}" for name in layers}
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embedding.weight


def test_a_replaced_layer_computes_nearly_the_same_forward_and_backward() -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 16))
    weight, x = first.weight, torch.randn(16, 32)
    expected = model(x)
    gradient = torch.autograd.grad(expected.square().sum(), weight)[0]
    eight_bits(model, CPU, emulate=True)
    found = model(x)
    rounded = torch.autograd.grad(found.square().sum(), weight)[0]
    # Three bits of mantissa forward, two for gradients: off by 1/16 and 1/8 at most in each of two products.
    assert 1e-4 < off(found, expected) < 2 / 16
    assert 1e-4 < off(rounded, gradient) < 2 / 8


def off(found: Tensor, right: Tensor) -> float:
    return float(((found - right).norm() / right.norm()).detach())


def test_what_cannot_be_run_in_8_bits_is_said() -> None:
    with pytest.raises(InputError, match="for which a CPU has no instructions"):
        eight_bits(nn.Linear(16, 16), CPU)
    with pytest.raises(InputError, match="has no linear layer whose sizes are multiples of 16"):
        eight_bits(nn.Sequential(nn.Linear(10, 10)), CPU, emulate=True)

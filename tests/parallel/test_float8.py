"""Linear layers in fp8, emulated: which layers are converted, and that they compute forward and backward."""

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.float8 import convert_linears_to_float8
from meshwright.workloads.text.decoder_sizes import decoder

pytest.importorskip("torchao", reason="fp8 needs torchao")

CPU = torch.device("cpu")


def test_layers_of_suitable_sizes_are_converted_and_tied_ones_are_not() -> None:
    model = decoder("gpt2", layers=1, hidden=32, heads=2, vocabulary=64, sequence=8)
    names = list(model.state_dict())
    convert_linears_to_float8(model, CPU, emulate=True)
    converted = {name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"}
    layers = ("attention.q", "attention.k", "attention.v", "attention.o", "feedforward.up", "feedforward.down")
    assert converted == {f"blocks.0.{name}" for name in layers}
    assert list(model.state_dict()) == names
    assert model.head.weight is model.embedding.weight


def test_a_converted_layer_computes_nearly_the_same_forward_and_backward() -> None:
    torch.manual_seed(0)
    first = nn.Linear(32, 64)
    model = nn.Sequential(first, nn.ReLU(), nn.Linear(64, 16))
    weight, x = first.weight, torch.randn(16, 32)
    expected = model(x)
    gradient = torch.autograd.grad(expected.square().sum(), weight)[0]
    convert_linears_to_float8(model, CPU, emulate=True)
    actual = model(x)
    rounded = torch.autograd.grad(actual.square().sum(), weight)[0]
    # Three bits of mantissa forward and two for gradients: errors of 1/16 and 1/8 at most in each of two products.
    assert 1e-4 < relative_error(actual, expected) < 2 / 16
    assert 1e-4 < relative_error(rounded, gradient) < 2 / 8


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float(((actual - expected).norm() / expected.norm()).detach())


def test_devices_and_models_without_fp8_are_refused() -> None:
    with pytest.raises(InputError, match="for which a CPU has no instructions"):
        convert_linears_to_float8(nn.Linear(16, 16), CPU)
    with pytest.raises(InputError, match="has no linear layer whose sizes are multiples of 16"):
        convert_linears_to_float8(nn.Sequential(nn.Linear(10, 10)), CPU, emulate=True)

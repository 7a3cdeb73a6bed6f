"""NNPACK's convolutions: the same results and gradients as torch's, and torch's own kernels for all other layers."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.blocks import convolutions
from meshwright.blocks.convolutions import NnpackConvolution, use_nnpack

LARGE, SMALL = (4, 5, 19, 17), (2, 5, 6, 7)  # in fp32, the first goes through NNPACK and the second through torch


def _layer(*arguments: Any, **options: Any) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(*arguments, **options)


def _with_gradients(layer: nn.Conv2d, images: Tensor) -> list[Tensor]:
    """Returns the layer's result, and the gradients of its input and its parameters."""
    images = images.clone().requires_grad_()
    result = layer(images)
    wanted = [images, *layer.parameters()]
    weights = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape).sin()
    return [result, *torch.autograd.grad((result * weights).sum(), wanted)]


@pytest.mark.parametrize("shape", [LARGE, SMALL])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "options",
    [{"kernel_size": 3}, {"kernel_size": 3, "padding": 1}, {"kernel_size": (5, 2), "padding": (4, 0), "bias": False}],
)
def test_results_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, options: dict[str, Any]
) -> None:
    layer, images = _layer(5, 6, **options).to(dtype), torch.randn(shape, dtype=dtype)
    expected = _with_gradients(layer, images)
    use_nnpack(layer)
    assert isinstance(layer._conv_forward, NnpackConvolution)
    for tensor, reference in zip(_with_gradients(layer, images), expected, strict=True):
        rounding = (2e-5 if dtype == torch.float32 else 1e-13) * float(reference.detach().abs().max())
        torch.testing.assert_close(tensor, reference, rtol=0, atol=rounding)


def test_large_images_go_through_nnpack() -> None:
    layer = _layer(5, 6, 3)
    use_nnpack(layer)
    with torch.profiler.profile() as profile:
        layer(torch.randn(LARGE))
    names = [event.key for event in profile.key_averages()]
    assert ("aten::_nnpack_spatial_convolution" in names) == torch.backends.nnpack.is_available()
    assert "aten::mkldnn_convolution" not in names


def test_gradients_can_be_differentiated_again() -> None:
    layer, images = _layer(1, 2, 2).double(), torch.randn(1, 1, 3, 3, dtype=torch.double, requires_grad=True)
    use_nnpack(layer)
    assert torch.autograd.gradgradcheck(lambda x, w, b: layer._conv_forward(x, w, b), (images, *layer.parameters()))


def test_weights_that_are_summed_in_several_parts_have_the_same_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, images = _layer(5, 6, 3).double(), torch.randn(LARGE, dtype=torch.double)
    expected = _with_gradients(layer, images)
    use_nnpack(layer)
    monkeypatch.setattr(convolutions, "_WINDOW_BYTES", 1)
    for tensor, reference in zip(_with_gradients(layer, images), expected, strict=True):
        torch.testing.assert_close(tensor, reference)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 4, 1),
        nn.Conv2d(4, 4, 3, stride=2),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding=3),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(4, 4, 3),
        nn.ConvTranspose2d(4, 4, 3),
    ],
)
def test_other_layers_keep_the_kernels_of_torch(layer: nn.Module) -> None:
    use_nnpack(layer)
    assert "_conv_forward" not in vars(layer)


def test_tensors_that_the_kernels_cannot_take_go_through_torch() -> None:
    layer, images = _layer(5, 6, 3), torch.randn(LARGE)
    per_sample = torch.func.vmap(torch.func.grad(lambda image: layer(image[None]).sin().sum()))
    expected = per_sample(images)
    use_nnpack(layer)
    torch.testing.assert_close(per_sample(images), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(images).dtype == torch.bfloat16
    assert layer(images[0]).shape == (6, 17, 15)
    assert layer(images[:0]).shape == (0, 6, 17, 15)
    (gradient,) = torch.autograd.grad(layer(images[:0]).sum(), [layer.weight])
    assert not gradient.any()


def test_a_copied_model_trains_its_own_weights() -> None:
    layer = _layer(5, 6, 3)
    use_nnpack(layer)
    other = copy.deepcopy(layer)
    with torch.no_grad():
        layer.weight.zero_()
    images = torch.randn(LARGE)
    torch.testing.assert_close(other(images), F.conv2d(images, other.weight, other.bias), rtol=0, atol=5e-5)

"""Convolutions on CPUs with other kernels than those of oneDNN, which torch chooses by default. On processors for which
oneDNN has no kernels of its own, such as ARM without SVE, its backward pass takes two to four times as long as these.

    output            NNPACK's convolution: Winograd's or Fourier's algorithm                      _Convolution.forward
    ∂loss/∂input      a convolution of ∂loss/∂output with the mirrored weights, also NNPACK's      _input_gradient
    ∂loss/∂weight     a matrix product of ∂loss/∂output with the windows of the input              _weight_gradient

They compute the same sums as torch's kernels, with other last bits. Training and the measurement of operators both use
this file.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

aten = torch.ops.aten
_WINDOW_BYTES = 4 * 2**20  # of the windows that are copied at once: they should stay in the processor's cache
_FEWEST_PIXELS = 512  # of the results of all samples: with fewer, it takes longer to transform the weights
_DTYPES = (torch.float32, torch.float64)
_Sides = tuple[int, int]


def use_nnpack(model: nn.Module) -> None:
    """Makes the convolutions of a model, in place, use these kernels. Layers for which they bring nothing stay as they
    are: those with groups, dilation, a stride, or kernels of 1×1."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d) and _has_nnpack_kernels(layer):
            # The function that `nn.Conv2d.forward` calls with the weights, which hooks or pruning may have changed.
            layer._conv_forward = NnpackConvolution(layer.padding)  # type: ignore[method-assign, assignment, arg-type]


def _has_nnpack_kernels(layer: nn.Conv2d) -> bool:
    is_plain = type(layer)._conv_forward is nn.Conv2d._conv_forward and layer.padding_mode == "zeros"
    padding = layer.padding
    return (
        is_plain
        and not isinstance(padding, str)
        and is_suitable(layer.kernel_size, layer.stride, padding, layer.dilation, layer.groups)
    )


def is_suitable(
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> bool:
    """Whether these kernels can compute a convolution, and may be faster than torch's."""
    is_dense = groups == 1 and set(stride) == set(dilation) == {1}
    return is_dense and 1 < max(kernel) <= 16 and all(pad < side for pad, side in zip(padding, kernel, strict=True))


@dataclass(frozen=True)
class NnpackConvolution:
    """Replaces `nn.Conv2d._conv_forward` of one layer. Tensors that these kernels cannot take, such as those of another
    dtype or of functional transforms, go to torch's kernels."""

    padding: _Sides

    def __call__(self, images: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _can_take(images, weight):
            return F.conv2d(images, weight, bias, padding=self.padding)
        return convolution(images, weight, bias, self.padding)


def _can_take(images: Tensor, weight: Tensor) -> bool:
    is_plain = type(images) is Tensor and images.dim() == 4 and images.device.type == "cpu"
    return (
        is_plain
        and images.dtype == weight.dtype
        and images.dtype in _DTYPES
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def convolution(images: Tensor, weight: Tensor, bias: Tensor | None, padding: _Sides) -> Tensor:
    """Returns the convolution with a stride of 1."""
    result: Tensor = _Convolution.apply(images, weight, bias, padding)
    return result


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, bias: Tensor | None, padding: _Sides) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.padding = padding
        if _nnpack_is_faster(images, weight, padding):
            result: Tensor = aten._nnpack_spatial_convolution(images, weight, bias, padding, (1, 1))
            return result
        return F.conv2d(images, weight, bias, padding=padding)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        images, weight = ctx.saved_tensors
        return *convolution_gradients(gradient, images, weight, ctx.padding, ctx.needs_input_grad[:3]), None


def _nnpack_is_faster(images: Tensor, weight: Tensor, padding: _Sides) -> bool:
    height, width = (images.shape[2 + n] + 2 * padding[n] - weight.shape[2 + n] + 1 for n in (0, 1))
    is_large = len(images) * height * width >= _FEWEST_PIXELS
    return is_large and images.dtype == torch.float32 and torch.backends.nnpack.is_available()


def convolution_gradients(
    gradient: Tensor, images: Tensor, weight: Tensor, padding: _Sides, needed: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Returns the gradients of the loss with respect to the images, the weight and the bias, from the `gradient` with
    respect to the result. A gradient that is not `needed` is None."""
    return (
        _input_gradient(gradient, weight, padding) if needed[0] else None,
        _weight_gradient(gradient, images, weight.shape, padding) if needed[1] else None,
        gradient.sum((0, 2, 3)) if needed[2] else None,
    )


def _input_gradient(gradient: Tensor, weight: Tensor, padding: _Sides) -> Tensor:
    mirrored = weight.flip(2, 3).transpose(0, 1)
    rest = (weight.shape[2] - 1 - padding[0], weight.shape[3] - 1 - padding[1])
    return convolution(gradient, mirrored, None, rest)


def _weight_gradient(gradient: Tensor, images: Tensor, shape: torch.Size, padding: _Sides) -> Tensor:
    """Sums over a few samples at a time, so that the copies of their windows stay in the cache. Both operands have the
    channels last: then the product needs no transposed copies, and a window is copied in long rows."""
    padded = F.pad(images, (padding[1], padding[1], padding[0], padding[0])) if any(padding) else images
    windows = padded.permute(0, 2, 3, 1).contiguous().unfold(1, shape[2], 1).unfold(2, shape[3], 1)
    windows = windows.permute(0, 1, 2, 4, 5, 3)
    gradients = gradient.permute(0, 2, 3, 1).contiguous()
    columns, pixels = shape[1:].numel(), gradient.shape[2] * gradient.shape[3]
    at_once = max(1, _WINDOW_BYTES // (pixels * columns * images.element_size()))
    total = gradient.new_zeros(shape[0], columns)
    for first in range(0, len(images), at_once):
        part = slice(first, first + at_once)
        total = total.addmm(gradients[part].reshape(-1, shape[0]).t(), windows[part].reshape(-1, columns))
    return total.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)

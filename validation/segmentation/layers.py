"""Layers that the published segmentation models share: convolution with norm and ReLU, resizing, and maps as tokens."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Convolution, BatchNorm and in-place ReLU; padding keeps the size, except for the stride. The published models use
    synchronized BatchNorm, which saves the same tensors as BatchNorm: its input and the statistics of the channels."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int] = 1,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        activation: bool = True,
        inplace: bool = True,
    ) -> None:
        sides = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (dilation * (sides[0] // 2), dilation * (sides[1] // 2))
        layers: list[nn.Module] = [
            nn.Conv2d(inputs, outputs, sides, stride, padding, dilation, groups, bias=False),
            nn.BatchNorm2d(outputs),
        ]
        if activation:
            layers.append(nn.ReLU(inplace=inplace))
        super().__init__(*layers)


class SeparableConv(nn.Sequential):
    """A depthwise and a pointwise convolution, each with norm and ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1, dilation: int = 1) -> None:
        super().__init__(
            ConvNorm(inputs, inputs, kernel, stride, dilation, groups=inputs), ConvNorm(inputs, outputs, 1)
        )


def resize(features: Tensor, size: Sequence[int], align_corners: bool = False) -> Tensor:
    return F.interpolate(features, size=tuple(size), mode="bilinear", align_corners=align_corners)


def to_map(tokens: Tensor, grid: Sequence[int]) -> Tensor:
    """Tokens of shape (batch, positions, width) as a map of shape (batch, width, *grid)."""
    count, _, width = tokens.shape
    return tokens.transpose(1, 2).reshape(count, width, *grid).contiguous()


def to_tokens(features: Tensor) -> Tensor:
    """A map of shape (batch, width, height, breadth) as tokens of shape (batch, positions, width)."""
    return features.flatten(2).transpose(1, 2).contiguous()

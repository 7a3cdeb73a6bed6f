"""The pieces that published segmentation models are made of: convolution with norm and ReLU, resizing, residuals."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn


class ConvNorm(nn.Sequential):
    """Convolution, BatchNorm and ReLU in place, the size kept but for the stride. Synchronized BatchNorm keeps what
    BatchNorm does: its input and the statistics of the channels."""

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
    """A list of tokens (batch, places, width) as a map (batch, width, height, breadth)."""
    count, _, width = tokens.shape
    return tokens.transpose(1, 2).reshape(count, width, *grid).contiguous()


def to_tokens(features: Tensor) -> Tensor:
    return features.flatten(2).transpose(1, 2).contiguous()

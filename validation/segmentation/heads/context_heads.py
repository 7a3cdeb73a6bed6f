"""Heads that gather context by convolution and pooling: FCN, PSPNet, DeepLabV3 and DeepLabV3+."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm, SeparableConv, resize

DROPOUT = 0.1


class Classifier(nn.Sequential):
    """Dropout of whole channels, then a score for each class."""

    def __init__(self, channels: int, classes: int, dropout: float = DROPOUT) -> None:
        layers: list[nn.Module] = [nn.Dropout2d(dropout)] if dropout else []
        super().__init__(*layers, nn.Conv2d(channels, classes, 1))


class FCNHead(nn.Module):
    """Convolutions on one of the backbone's features; `concat` adds one on the concatenation of their output and the
    input."""

    def __init__(
        self,
        inputs: int,
        channels: int,
        classes: int,
        convs: int = 1,
        concat: bool = False,
        feature: int = 2,
        kernel: int = 3,
        dilation: int = 1,
        dropout: float = DROPOUT,
    ) -> None:
        super().__init__()
        self.feature = feature
        self.convs = nn.Sequential(
            *(ConvNorm(inputs if number == 0 else channels, channels, kernel, 1, dilation) for number in range(convs))
        )
        self.joined = ConvNorm(inputs + channels, channels, kernel) if concat else None
        self.classifier = Classifier(channels, classes, dropout)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[self.feature]
        out = self.convs(x)
        if self.joined is not None:
            out = self.joined(torch.cat([x, out], 1))
        scores: Tensor = self.classifier(out)
        return scores


class PyramidPooling(nn.Module):
    """The concatenation of the input with its means over grids of 1, 2, 3 and 6 cells per side."""

    def __init__(self, inputs: int, channels: int, sides: Sequence[int] = (1, 2, 3, 6)) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.Sequential(nn.AdaptiveAvgPool2d(side), ConvNorm(inputs, channels)) for side in sides
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, *(resize(level(x), x.shape[2:]) for level in self.levels)], 1)


class PSPHead(nn.Module):
    def __init__(self, inputs: int, channels: int, classes: int, feature: int = 3) -> None:
        super().__init__()
        self.feature = feature
        self.pooling = PyramidPooling(inputs, channels)
        self.joined = ConvNorm(inputs + 4 * channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.classifier(self.joined(self.pooling(features[self.feature])))
        return scores


class AtrousPyramid(nn.Module):
    """ASPP: the mean of the map and convolutions with several dilations, joined by a convolution."""

    def __init__(self, inputs: int, channels: int, dilations: Sequence[int], separable: bool = False) -> None:
        super().__init__()
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(inputs, channels))
        self.branches = nn.ModuleList(
            ConvNorm(inputs, channels)
            if dilation == 1
            else SeparableConv(inputs, channels, dilation=dilation)
            if separable
            else ConvNorm(inputs, channels, 3, dilation=dilation)
            for dilation in dilations
        )
        self.joined = ConvNorm((len(dilations) + 1) * channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        parts = [resize(self.pool(x), x.shape[2:]), *(branch(x) for branch in self.branches)]
        joined: Tensor = self.joined(torch.cat(parts, 1))
        return joined


class ASPPHead(nn.Module):
    def __init__(
        self, inputs: int, channels: int, classes: int, dilations: Sequence[int] = (1, 12, 24, 36), feature: int = 3
    ) -> None:
        super().__init__()
        self.feature = feature
        self.pyramid = AtrousPyramid(inputs, channels, dilations)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        scores: Tensor = self.classifier(self.pyramid(features[self.feature]))
        return scores


class SeparableASPPHead(nn.Module):
    """DeepLabV3+: the result of ASPP is enlarged, concatenated with the first stage's features and refined. `fine` is
    the number of channels of those features; 0 leaves them out."""

    def __init__(
        self,
        inputs: int,
        channels: int,
        classes: int,
        fine: int,
        fine_channels: int = 48,
        dilations: Sequence[int] = (1, 12, 24, 36),
        feature: int = 3,
    ) -> None:
        super().__init__()
        self.feature = feature
        self.pyramid = AtrousPyramid(inputs, channels, dilations, separable=True)
        self.fine = ConvNorm(fine, fine_channels) if fine else None
        wide = channels + (fine_channels if fine else 0)
        self.refine = nn.Sequential(SeparableConv(wide, channels), SeparableConv(channels, channels))
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        out = self.pyramid(features[self.feature])
        if self.fine is not None:
            fine = self.fine(features[0])
            out = torch.cat([resize(out, fine.shape[2:]), fine], 1)
        scores: Tensor = self.classifier(self.refine(out))
        return scores

"""BiSeNetV1: a shallow path for details and a ResNet for context, which are fused at an eighth of the size."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.resnet import ResNet
from validation.segmentation.layers import ConvNorm


class Refinement(nn.Module):
    """A convolution whose output channels are weighted by a gate that is computed from their means."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = ConvNorm(inputs, outputs, 3)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(outputs, outputs, activation=False), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        gated: Tensor = x * self.gate(x)
        return gated


class ContextPath(nn.Module):
    """Features at an eighth and at a sixteenth of the size, from the last two stages of a ResNet and the mean of the
    last one."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.backbone = ResNet(depth, 32, deep_stem=False)
        _, eighth, sixteenth, last = self.backbone.widths
        self.whole = nn.Sequential(nn.AdaptiveAvgPool2d(1), ConvNorm(last, eighth))
        self.refine_last = Refinement(last, eighth)
        self.refine_before = Refinement(sixteenth, eighth)
        self.head_last = ConvNorm(eighth, eighth, 3)
        self.head_before = ConvNorm(eighth, eighth, 3)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        _, eighth, sixteenth, last = self.backbone(images)
        whole = self.whole(last)
        coarse = self.refine_last(last) + F.interpolate(whole, size=last.shape[2:], mode="nearest")
        coarse = self.head_last(F.interpolate(coarse, size=sixteenth.shape[2:], mode="nearest"))
        fine = self.refine_before(sixteenth) + coarse
        fine = self.head_before(F.interpolate(fine, size=eighth.shape[2:], mode="nearest"))
        return fine, coarse


class BiSeNet(nn.Module):
    """Returns the fused features and those of the context path."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.context = ContextPath(depth)
        wide = self.context.backbone.widths[1]
        narrow = wide // 2
        self.detail = nn.Sequential(
            ConvNorm(3, narrow, 7, 2),
            ConvNorm(narrow, narrow, 3, 2),
            ConvNorm(narrow, narrow, 3, 2),
            ConvNorm(narrow, wide),
        )
        self.fuse = ConvNorm(2 * wide, 2 * wide)
        self.gate = nn.Sequential(ConvNorm(2 * wide, 2 * wide, activation=False), nn.Sigmoid())
        self.widths: Sequence[int] = (2 * wide, wide, wide)

    def forward(self, images: Tensor) -> list[Tensor]:
        fine, coarse = self.context(images)
        fused = self.fuse(torch.cat([self.detail(images), fine], 1))
        gate = self.gate(F.adaptive_avg_pool2d(fused, 1))
        return [fused * gate + fused, fine, coarse]

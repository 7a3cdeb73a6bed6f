"""FastFCN's joint pyramid upsampling: the last three stages at the size of the first of them, by four dilations."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm, SeparableConv, resize

DILATIONS = (1, 2, 4, 8)


class JointUpsampling(nn.Module):
    """Gives the backbone's features back with the last one replaced."""

    def __init__(self, widths: Sequence[int], channels: int = 512) -> None:
        super().__init__()
        self.levels = nn.ModuleList(ConvNorm(width, channels, 3) for width in widths)
        self.dilated = nn.ModuleList(
            SeparableConv(len(widths) * channels, channels, dilation=dilation) for dilation in DILATIONS
        )

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        *before, _ = features
        levels = [level(feature) for level, feature in zip(self.levels, features[1:], strict=True)]
        size = levels[0].shape[2:]
        joined = torch.cat([levels[0], *(resize(level, size) for level in levels[1:])], 1)
        return [*before, torch.cat([dilated(joined) for dilated in self.dilated], 1)]

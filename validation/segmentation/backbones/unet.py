"""UNet with five levels: two convolutions per level on the way down, and two on the way up on the concatenation with
the features of the same level."""

import torch
from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm

WIDTHS = (64, 128, 256, 512, 1024)


def _pair(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(ConvNorm(inputs, outputs, 3), ConvNorm(outputs, outputs, 3))


class UNet(nn.Module):
    """Returns its features from the coarsest to the finest."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(_pair(3 if n == 0 else WIDTHS[n - 1], width) for n, width in enumerate(WIDTHS))
        self.pool = nn.MaxPool2d(2)
        self.enlarge = nn.ModuleList(
            nn.Sequential(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), ConvNorm(2 * width, width))
            for width in WIDTHS[-2::-1]
        )
        self.up = nn.ModuleList(_pair(2 * width, width) for width in WIDTHS[-2::-1])

    def forward(self, images: Tensor) -> list[Tensor]:
        x = images
        skips = []
        for number, level in enumerate(self.down):
            x = level(self.pool(x) if number else x)
            skips.append(x)
        features = [x]
        for enlarge, level, skip in zip(self.enlarge, self.up, skips[-2::-1], strict=True):
            x = level(torch.cat([skip, enlarge(x)], 1))
            features.append(x)
        return features

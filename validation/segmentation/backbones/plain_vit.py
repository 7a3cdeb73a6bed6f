"""A neck and a head for plain vision transformers, whose features all have the same size."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm, to_map, to_tokens


class LevelNeck(nn.Module):
    """Makes maps of four sizes from maps of one size: 1×1 convolutions, resizing by 4, 2, 1 and ½, and 3×3
    convolutions, without norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = (4.0, 2.0, 1.0, 0.5)
        self.laterals = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in self.scales)
        self.levels = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in self.scales)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        maps = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        return [
            level(F.interpolate(x, scale_factor=scale, mode="bilinear"))
            for level, x, scale in zip(self.levels, maps, self.scales, strict=True)
        ]


class UpsamplingHead(nn.Module):
    """SETR's head: a norm, then convolutions, each followed by enlarging by the factor `enlarged`."""

    def __init__(
        self, width: int, classes: int, feature: int, convs: int, enlarged: int, kernel: int, channels: int = 256
    ) -> None:
        super().__init__()
        self.feature = feature
        self.norm = nn.LayerNorm(width)
        layers: list[nn.Module] = []
        for number in range(convs):
            layers.append(ConvNorm(width if number == 0 else channels, channels, kernel))
            layers.append(nn.Upsample(scale_factor=enlarged, mode="bilinear", align_corners=False))
        self.convs = nn.Sequential(*layers)
        self.classifier = nn.Conv2d(channels, classes, 1)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[self.feature]
        normed = to_map(self.norm(to_tokens(x)), x.shape[2:])
        scores: Tensor = self.classifier(self.convs(normed))
        return scores

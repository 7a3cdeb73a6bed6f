"""What stands on a plain vision transformer, whose features are all of one size: necks and heads for it."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.layers import ConvNorm, to_map, to_tokens


class LevelNeck(nn.Module):
    """Four sizes out of one: 1×1 convolutions, resizing by 4, 2, 1 and ½, and 3×3 convolutions; no norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scales = (4.0, 2.0, 1.0, 0.5)
        self.laterals = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in self.scales)
        self.levels = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in self.scales)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        found = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        return [
            level(F.interpolate(one, scale_factor=scale, mode="bilinear"))
            for level, one, scale in zip(self.levels, found, self.scales, strict=True)
        ]


class UpsamplingHead(nn.Module):
    """SETR's: norm, then convolutions that are each followed by enlarging."""

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

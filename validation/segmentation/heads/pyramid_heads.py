"""Heads that join the backbone's stages from coarse to fine: UPerNet and Semantic FPN."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.heads.context_heads import Classifier, PyramidPooling
from validation.segmentation.layers import ConvNorm, resize


class UPerHead(nn.Module):
    """Pyramid pooling on the last stage, then a feature pyramid whose levels are concatenated at the finest size."""

    def __init__(self, widths: Sequence[int], channels: int, classes: int) -> None:
        super().__init__()
        self.pooling = PyramidPooling(widths[-1], channels)
        self.pooled = ConvNorm(widths[-1] + 4 * channels, channels, 3)
        self.laterals = nn.ModuleList(ConvNorm(width, channels, inplace=False) for width in widths[:-1])
        self.levels = nn.ModuleList(ConvNorm(channels, channels, 3, inplace=False) for _ in widths[:-1])
        self.joined = ConvNorm(len(widths) * channels, channels, 3)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        maps = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=False)]
        maps.append(self.pooled(self.pooling(features[-1])))
        for number in range(len(maps) - 1, 0, -1):
            maps[number - 1] = maps[number - 1] + resize(maps[number], maps[number - 1].shape[2:])
        outs = [*(level(x) for level, x in zip(self.levels, maps, strict=False)), maps[-1]]
        for number in range(len(outs) - 1, 0, -1):
            outs[number] = resize(outs[number], outs[0].shape[2:])
        scores: Tensor = self.classifier(self.joined(torch.cat(outs, 1)))
        return scores


class FeaturePyramid(nn.Module):
    """FPN's neck: 1×1 laterals, nearest-neighbour top-down sums, 3×3 convolutions; no norm."""

    def __init__(self, widths: Sequence[int], channels: int = 256) -> None:
        super().__init__()
        self.laterals = nn.ModuleList(nn.Conv2d(width, channels, 1) for width in widths)
        self.levels = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in widths)

    def forward(self, features: Sequence[Tensor]) -> list[Tensor]:
        maps = [lateral(feature) for lateral, feature in zip(self.laterals, features, strict=True)]
        for number in range(len(maps) - 1, 0, -1):
            larger = F.interpolate(maps[number], size=maps[number - 1].shape[2:], mode="nearest")
            maps[number - 1] = maps[number - 1] + larger
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


class SemanticFPNHead(nn.Module):
    """Each level is convolved and doubled in size until it is as fine as the first level; then levels are summed."""

    def __init__(self, channels: int, inner: int, classes: int, levels: int = 4) -> None:
        super().__init__()
        self.branches = nn.ModuleList()
        for level in range(levels):
            layers: list[nn.Module] = []
            for number in range(max(1, level)):
                layers.append(ConvNorm(channels if number == 0 else inner, inner, 3))
                if level:
                    layers.append(nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False))
            self.branches.append(nn.Sequential(*layers))
        self.classifier = Classifier(inner, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        total = self.branches[0](features[0])
        for branch, feature in zip(list(self.branches)[1:], list(features)[1:], strict=True):
            total = total + resize(branch(feature), total.shape[2:])
        scores: Tensor = self.classifier(total)
        return scores


class Neck(nn.Module):
    """A backbone followed by a neck, a module that transforms its features before the heads use them."""

    def __init__(self, backbone: nn.Module, neck: nn.Module) -> None:
        super().__init__()
        self.backbone = backbone
        self.neck = neck

    def forward(self, images: Tensor) -> list[Tensor]:
        features: list[Tensor] = self.neck(self.backbone(images))
        return features

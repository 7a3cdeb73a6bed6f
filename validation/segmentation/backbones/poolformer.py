"""PoolFormer: a transformer in which a mean over neighbouring positions replaces attention."""

import torch
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import StochasticDepth

STOCHASTIC_DEPTH = 0.1
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "s12": ((64, 128, 320, 512), (2, 2, 6, 2)),
    "s24": ((64, 128, 320, 512), (4, 4, 12, 4)),
    "s36": ((64, 128, 320, 512), (6, 6, 18, 6)),
    "m36": ((96, 192, 384, 768), (6, 6, 18, 6)),
    "m48": ((96, 192, 384, 768), (8, 8, 24, 8)),
}


class PoolBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(1, width)
        self.pool = nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.scale1 = nn.Parameter(torch.ones(width, 1, 1))
        self.norm2 = nn.GroupNorm(1, width)
        self.feed = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.GELU(), nn.Conv2d(4 * width, width, 1))
        self.scale2 = nn.Parameter(torch.ones(width, 1, 1))
        self.path = StochasticDepth(STOCHASTIC_DEPTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.path(self.scale1 * (self.pool(normed) - normed))
        result: Tensor = x + self.path(self.scale2 * self.feed(self.norm2(x)))
        return result


class PoolFormer(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        widths, layers = SIZES[kind]
        self.widths = list(widths)
        self.embeds = nn.ModuleList(
            nn.Conv2d(widths[level - 1], width, 3, 2, 1) if level else nn.Conv2d(3, width, 7, 4, 2)
            for level, width in enumerate(widths)
        )
        self.stages = nn.ModuleList(
            nn.Sequential(*(PoolBlock(width) for _ in range(count)))
            for width, count in zip(widths, layers, strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(1, width) for width in widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for embed, stage, norm in zip(self.embeds, self.stages, self.norms, strict=True):
            x = stage(embed(x))
            features.append(norm(x))
        return features

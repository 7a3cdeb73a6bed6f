"""ConvNeXt: blocks of a large depthwise convolution and a feed-forward over channels, on maps of four sizes."""

import torch
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import FeedForward, StochasticDepth

STOCHASTIC_DEPTH = 0.4
SIZES: dict[str, tuple[int, tuple[int, ...]]] = {
    "tiny": (96, (3, 3, 9, 3)),
    "small": (96, (3, 3, 27, 3)),
    "base": (128, (3, 3, 27, 3)),
    "large": (192, (3, 3, 27, 3)),
    "xlarge": (256, (3, 3, 27, 3)),
}


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of a map."""

    def forward(self, x: Tensor) -> Tensor:
        normed: Tensor = super().forward(x.permute(0, 2, 3, 1))
        return normed.permute(0, 3, 1, 2).contiguous()


class ConvBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.feed = FeedForward(width, 4 * width)
        self.scale = nn.Parameter(torch.ones(1, width, 1, 1))
        self.path = StochasticDepth(STOCHASTIC_DEPTH)

    def forward(self, x: Tensor) -> Tensor:
        out = self.feed(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        result: Tensor = x + self.path(out.mul(self.scale))
        return result


class ConvNeXt(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width, counts = SIZES[kind]
        self.widths = [width * 2**level for level in range(4)]
        self.downs = nn.ModuleList([nn.Sequential(nn.Conv2d(3, width, 4, 4), ChannelNorm(width))])
        for before, after in zip(self.widths, self.widths[1:], strict=False):
            self.downs.append(nn.Sequential(ChannelNorm(before), nn.Conv2d(before, after, 2, 2)))
        self.stages = nn.ModuleList(
            nn.Sequential(*(ConvBlock(wide) for _ in range(count)))
            for wide, count in zip(self.widths, counts, strict=True)
        )
        self.norms = nn.ModuleList(ChannelNorm(wide) for wide in self.widths)

    def forward(self, x: Tensor) -> list[Tensor]:
        features = []
        for down, stage, norm in zip(self.downs, self.stages, self.norms, strict=True):
            x = stage(down(x))
            features.append(norm(x))
        return features

"""SegFormer: a transformer with maps of four sizes and strided keys (MiT), and a head of 1×1 convolutions."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import Attention, StochasticDepth
from validation.segmentation.heads.context_heads import Classifier
from validation.segmentation.layers import ConvNorm, resize, to_map, to_tokens

LAYERS = {0: (2, 2, 2, 2), 1: (2, 2, 2, 2), 2: (3, 4, 6, 3), 3: (3, 4, 18, 3), 4: (3, 8, 27, 3), 5: (3, 6, 40, 3)}
HEADS = (1, 2, 5, 8)
STRIDES = (8, 4, 2, 1)
STOCHASTIC_DEPTH = 0.1


class StridedBlock(nn.Module):
    """Attention to the keys of a coarser map, then a feed-forward that contains a depthwise convolution."""

    def __init__(self, width: int, heads: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.reduce = nn.Conv2d(width, width, stride, stride) if stride > 1 else None
        self.reduced = nn.LayerNorm(width) if stride > 1 else None
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(
            nn.Conv2d(width, 4 * width, 1),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1, groups=4 * width),
            nn.GELU(),
            nn.Conv2d(4 * width, width, 1),
        )
        self.path = StochasticDepth(STOCHASTIC_DEPTH)

    def forward(self, tokens: Tensor, grid: Sequence[int]) -> Tensor:
        normed = self.norm1(tokens)
        context = None
        if self.reduce is not None and self.reduced is not None:
            context = self.reduced(to_tokens(self.reduce(to_map(normed, grid))))
        tokens = tokens + self.path(self.attention(normed, context))
        out = self.feed(to_map(self.norm2(tokens), grid))
        result: Tensor = tokens + self.path(to_tokens(out))
        return result


class MixTransformer(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        base = 32 if kind == 0 else 64
        self.widths = [base * heads for heads in HEADS]
        sides = ((7, 4), (3, 2), (3, 2), (3, 2))
        inputs = [3, *self.widths[:3]]
        self.embeds = nn.ModuleList(
            nn.Conv2d(before, width, kernel, stride, kernel // 2)
            for before, width, (kernel, stride) in zip(inputs, self.widths, sides, strict=True)
        )
        self.embedded = nn.ModuleList(nn.LayerNorm(width) for width in self.widths)
        self.stages = nn.ModuleList(
            nn.ModuleList(StridedBlock(width, heads, stride) for _ in range(count))
            for width, heads, stride, count in zip(self.widths, HEADS, STRIDES, LAYERS[kind], strict=True)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for width in self.widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = images
        features = []
        parts = zip(self.embeds, self.embedded, self.stages, self.norms, strict=True)
        for embed, embedded, stage, norm in parts:
            x = embed(x)
            grid = x.shape[2:]
            tokens = embedded(to_tokens(x))
            for block in stage.children():
                tokens = block(tokens, grid)
            x = to_map(norm(tokens), grid)
            features.append(x)
        return features


class SegFormerHead(nn.Module):
    """A 1×1 convolution on every level, which is enlarged to the finest size, and one on their concatenation."""

    def __init__(self, widths: Sequence[int], classes: int, channels: int = 256) -> None:
        super().__init__()
        self.levels = nn.ModuleList(ConvNorm(width, channels) for width in widths)
        self.joined = ConvNorm(len(widths) * channels, channels)
        self.classifier = Classifier(channels, classes)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        size = features[0].shape[2:]
        outs = [resize(level(feature), size) for level, feature in zip(self.levels, features, strict=True)]
        scores: Tensor = self.classifier(self.joined(torch.cat(outs, 1)))
        return scores

"""Twins: transformers with maps of four sizes, and strided keys (PCPVT) or windows in every other block (SVT)."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import Attention, FeedForward, StochasticDepth
from validation.segmentation.layers import to_map, to_tokens

STOCHASTIC_DEPTH = 0.2
STRIDES = (8, 4, 2, 1)
WINDOW = 7
# Widths, heads, layers and expansion factors of the feed-forward of the four stages.
SIZES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "pcpvt-s": ((64, 128, 320, 512), (1, 2, 5, 8), (3, 4, 6, 3), (8, 8, 4, 4)),
    "pcpvt-b": ((64, 128, 320, 512), (1, 2, 5, 8), (3, 4, 18, 3), (8, 8, 4, 4)),
    "pcpvt-l": ((64, 128, 320, 512), (1, 2, 5, 8), (3, 8, 27, 3), (8, 8, 4, 4)),
    "svt-s": ((64, 128, 256, 512), (2, 4, 8, 16), (2, 2, 10, 4), (4, 4, 4, 4)),
    "svt-b": ((96, 192, 384, 768), (3, 6, 12, 24), (2, 2, 18, 2), (4, 4, 4, 4)),
    "svt-l": ((128, 256, 512, 1024), (4, 8, 16, 32), (2, 2, 18, 2), (4, 4, 4, 4)),
}


class TwinsBlock(nn.Module):
    """Attention to the keys of a coarser map, or within windows if `stride` is 0."""

    def __init__(self, width: int, heads: int, stride: int, factor: int) -> None:
        super().__init__()
        self.windowed = stride == 0
        self.norm1 = nn.LayerNorm(width)
        self.reduce = nn.Conv2d(width, width, stride, stride) if stride > 1 else None
        self.reduced = nn.LayerNorm(width) if stride > 1 else None
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width, factor * width)
        self.path = StochasticDepth(STOCHASTIC_DEPTH)

    def forward(self, tokens: Tensor, grid: Sequence[int]) -> Tensor:
        tokens = tokens + self.path(self._attended(self.norm1(tokens), grid))
        result: Tensor = tokens + self.path(self.feed(self.norm2(tokens)))
        return result

    def _attended(self, tokens: Tensor, grid: Sequence[int]) -> Tensor:
        context = None
        if self.windowed:
            return self._within_windows(tokens, grid)
        if self.reduce is not None and self.reduced is not None:
            context = self.reduced(to_tokens(self.reduce(to_map(tokens, grid))))
        attended: Tensor = self.attention(tokens, context)
        return attended

    def _within_windows(self, tokens: Tensor, grid: Sequence[int]) -> Tensor:
        count, _, width = tokens.shape
        height, breadth = grid
        x = F.pad(tokens.view(count, height, breadth, width), (0, 0, 0, -breadth % WINDOW, 0, -height % WINDOW))
        rows, columns = x.shape[1] // WINDOW, x.shape[2] // WINDOW
        x = x.reshape(count, rows, WINDOW, columns, WINDOW, width).transpose(2, 3)
        x = self.attention(x.reshape(-1, WINDOW**2, width)).view(count, rows, columns, WINDOW, WINDOW, width)
        x = x.transpose(2, 3).reshape(count, rows * WINDOW, columns * WINDOW, width)
        return x[:, :height, :breadth].contiguous().view(count, height * breadth, width)


class TwinsStage(nn.Module):
    """Patch embedding, then blocks. A depthwise convolution after the first block encodes positions."""

    def __init__(self, inputs: int, width: int, patch: int, blocks: Sequence[TwinsBlock], normed: bool) -> None:
        super().__init__()
        self.embed = nn.Conv2d(inputs, width, patch, patch)
        self.embedded = nn.LayerNorm(width)
        self.first = blocks[0]
        self.positions = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.rest = nn.ModuleList(blocks[1:])
        self.norm = nn.LayerNorm(width) if normed else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        grid = x.shape[2:]
        tokens = self.first(self.embedded(to_tokens(x)), grid)
        as_map = to_map(tokens, grid)
        tokens = to_tokens(self.positions(as_map) + as_map)
        for block in self.rest:
            tokens = block(tokens, grid)
        return to_map(self.norm(tokens), grid)


class Twins(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        widths, heads, layers, factors = SIZES[kind]
        windows = kind.startswith("svt")
        self.widths = list(widths)
        self.stages = nn.ModuleList()
        for level, width in enumerate(widths):
            blocks = [
                TwinsBlock(width, heads[level], 0 if windows and number % 2 == 0 else STRIDES[level], factors[level])
                for number in range(layers[level])
            ]
            inputs, patch = (widths[level - 1], 2) if level else (3, 4)
            self.stages.append(TwinsStage(inputs, width, patch, blocks, normed=windows))

    def forward(self, images: Tensor) -> list[Tensor]:
        features = [self.stages[0](images)]
        for stage in list(self.stages)[1:]:
            features.append(stage(features[-1]))
        return features

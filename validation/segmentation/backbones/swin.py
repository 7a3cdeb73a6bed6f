"""Swin: attention within windows that are shifted from block to block, on maps of four sizes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from validation.segmentation.backbones.transformer import Attention, FeedForward, StochasticDepth
from validation.segmentation.layers import to_map, to_tokens

STOCHASTIC_DEPTH = 0.3
SIZES: dict[str, tuple[int, tuple[int, ...], tuple[int, ...]]] = {
    "tiny": (96, (2, 2, 6, 2), (3, 6, 12, 24)),
    "small": (96, (2, 2, 18, 2), (3, 6, 12, 24)),
    "base": (128, (2, 2, 18, 2), (4, 8, 16, 32)),
    "large": (192, (2, 2, 18, 2), (6, 12, 24, 48)),
}


class WindowBlock(nn.Module):
    def __init__(self, width: int, heads: int, window: int, shifted: bool) -> None:
        super().__init__()
        self.window = window
        self.shift = window // 2 if shifted else 0
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, biased=window)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width, 4 * width)
        self.path = StochasticDepth(STOCHASTIC_DEPTH)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens = tokens + self.path(self._attended(self.norm1(tokens), grid))
        result: Tensor = tokens + self.path(self.feed(self.norm2(tokens)))
        return result

    def _attended(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        count, _, width = tokens.shape
        (height, breadth), side = grid, self.window
        x = tokens.view(count, height, breadth, width)
        x = F.pad(x, (0, 0, 0, -breadth % side, 0, -height % side))
        rows, columns = x.shape[1] // side, x.shape[2] // side
        mask = None
        if self.shift:
            x = torch.roll(x, (-self.shift, -self.shift), (1, 2))
            mask = x.new_zeros(rows * columns, side**2, side**2)
        x = x.view(count, rows, side, columns, side, width).transpose(2, 3).reshape(-1, side**2, width)
        x = self.attention(x, mask=mask).view(count, rows, columns, side, side, width)
        x = x.transpose(2, 3).reshape(count, rows * side, columns * side, width)
        if self.shift:
            x = torch.roll(x, (self.shift, self.shift), (1, 2))
        return x[:, :height, :breadth].reshape(count, height * breadth, width)


class Merging(nn.Module):
    """Four neighbouring tokens become one of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.out = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        merged = F.unfold(to_map(tokens, grid), 2, stride=2).transpose(1, 2)
        result: Tensor = self.out(self.norm(merged))
        return result


class Swin(nn.Module):
    """Returns the features of its four stages."""

    def __init__(self, kind: str, window: int = 7) -> None:
        super().__init__()
        width, counts, heads = SIZES[kind]
        self.widths = [width * 2**level for level in range(4)]
        self.embed = nn.Conv2d(3, width, 4, 4)
        self.embedded = nn.LayerNorm(width)
        self.stages = nn.ModuleList(
            nn.ModuleList(WindowBlock(wide, head, window, number % 2 == 1) for number in range(count))
            for wide, head, count in zip(self.widths, heads, counts, strict=True)
        )
        self.merges = nn.ModuleList(Merging(wide) for wide in self.widths[:-1])
        self.norms = nn.ModuleList(nn.LayerNorm(wide) for wide in self.widths)

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.embed(images)
        grid = (x.shape[2], x.shape[3])
        tokens = self.embedded(to_tokens(x))
        features = []
        for number, (stage, norm) in enumerate(zip(self.stages, self.norms, strict=True)):
            for block in stage.children():
                tokens = block(tokens, grid)
            features.append(to_map(norm(tokens), grid))
            if number < len(self.merges):
                tokens = self.merges[number](tokens, grid)
                grid = (grid[0] // 2, grid[1] // 2)
        return features

"""Layers of the published vision transformers: attention made of small operators, feed-forward, stochastic depth."""

import torch
from torch import Tensor, nn

from validation.segmentation.era import dropout, softmax
from validation.segmentation.layers import to_map


class Attention(nn.Module):
    """Multi-head attention that saves its scores. Keys and values come from `context`, or from `tokens` if it is None.
    With `biased`, the side of a window, a learned bias of shape (heads, tokens, tokens) is added to the scores."""

    def __init__(self, width: int, heads: int, drop: float = 0.0, biased: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.drop = drop
        self.scale = (width // heads) ** -0.5
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        self.bias = nn.Parameter(torch.zeros((2 * biased - 1) ** 2, heads)) if biased else None

    def _per_head(self, tokens: Tensor) -> Tensor:
        count, length, width = tokens.shape
        split = tokens.view(count, length, self.heads, width // self.heads).transpose(1, 2)
        return split.reshape(count * self.heads, length, width // self.heads)

    def forward(self, tokens: Tensor, context: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        count, length, width = tokens.shape
        query = self._per_head(self.query(tokens) * self.scale)
        both = self.key_value(tokens if context is None else context)
        key, value = (self._per_head(part.contiguous()) for part in both.chunk(2, dim=-1))
        scores = torch.bmm(query, key.transpose(1, 2))
        if self.bias is not None:
            positions = torch.zeros(length * length, dtype=torch.long, device=tokens.device)
            bias = self.bias[positions].view(length, length, self.heads).permute(2, 0, 1).contiguous()
            scores = scores.view(count, self.heads, length, length) + bias.unsqueeze(0)
            if mask is not None:
                windows = mask.shape[0]
                scores = scores.view(count // windows, windows, self.heads, length, length) + mask[None, :, None]
            scores = scores.view(count * self.heads, length, length)
        weights = dropout(softmax(scores, -1), self.drop)
        attended = torch.bmm(weights, value).view(count, self.heads, length, width // self.heads)
        result: Tensor = self.out(attended.transpose(1, 2).reshape(count, length, width))
        return result


class FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.wide = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.narrow = nn.Linear(hidden, width)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = dropout(self.act(self.wide(tokens)), self.drop)
        return dropout(self.narrow(hidden), self.drop)


class StochasticDepth(nn.Module):
    """Drops the whole branch for some samples; saves one number per sample."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        if not self.probability:
            return x
        mask = x.new_ones((x.shape[0], *[1] * (x.dim() - 1)))
        return x.div(1 - self.probability) * mask


class Block(nn.Module):
    """A transformer block: norm and attention, then norm and feed-forward, each added to its input."""

    def __init__(self, width: int, heads: int, drop: float = 0.0, path: float = 0.0, hidden: int = 0) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.feed = FeedForward(width, hidden or 4 * width, drop)
        self.path = StochasticDepth(path)
        self.drop = drop

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens + self.path(dropout(self.attention(self.norm1(tokens)), self.drop))
        result: Tensor = tokens + self.path(self.feed(self.norm2(tokens)))
        return result


class VisionTransformer(nn.Module):
    """Returns the map after each of its parts, all of one size; `parts` has the number of layers of each part."""

    def __init__(
        self,
        width: int,
        heads: int,
        parts: tuple[int, ...],
        size: tuple[int, int],
        drop: float = 0.0,
        path: float = 0.0,
        patch: int = 16,
        final_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 1 + (size[0] // patch) * (size[1] // patch), width))
        self.parts = nn.ModuleList(
            nn.Sequential(*(Block(width, heads, drop, path) for _ in range(layers))) for layers in parts
        )
        self.norm = nn.LayerNorm(width) if final_norm else nn.Identity()
        self.drop = drop

    def forward(self, images: Tensor) -> list[Tensor]:
        x = self.embed(images)
        grid = x.shape[2:]
        tokens = x.flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1)
        tokens = dropout(tokens + self.positions, self.drop)
        features = []
        for number, part in enumerate(self.parts, start=1):
            tokens = part(tokens)
            last = self.norm(tokens) if number == len(self.parts) else tokens
            features.append(to_map(last[:, 1:], grid))
        return features

"""A small decoder language model and the rows of text it is trained on, for the training scripts in this folder."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, LENGTH, ROWS = 64, 16, 8  # rows of a global batch


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.wq = nn.Linear(dim, dim, bias=False)
        self.wk = nn.Linear(dim, dim, bias=False)
        self.wv = nn.Linear(dim, dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length = x.shape[:2]
        # The number of heads is that of the weights, which tensor parallelism divides.
        q, k, v = (w(x).view(rows, length, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(rows, length, -1))


class FeedForward(nn.Module):
    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim)
        self.attention = Attention(dim, heads)
        self.ffn_norm = nn.RMSNorm(dim)
        self.feed_forward: nn.Module = FeedForward(dim, 2 * dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class TinyGPT(nn.Module):
    def __init__(self, dim: int = 32, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.tok_embeddings: nn.Module | None = nn.Embedding(VOCABULARY, dim)
        self.positions: nn.Module | None = nn.Embedding(LENGTH, dim)
        self.layers = nn.ModuleDict({str(number): Block(dim, heads) for number in range(layers)})
        self.norm: nn.Module | None = nn.RMSNorm(dim)
        self.output: nn.Module | None = nn.Linear(dim, VOCABULARY, bias=False)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        # A stage of a pipeline has only some of these modules.
        if self.tok_embeddings is not None and self.positions is not None:
            positions = torch.arange(x.shape[1]) if positions is None else positions
            x = self.tok_embeddings(x) + self.positions(positions)
        for layer in self.layers.values():
            x = layer(x)
        x = self.norm(x) if self.norm is not None else x
        return self.output(x) if self.output is not None else x


def text(steps: int, masked: bool = False) -> tuple[Tensor, Tensor]:
    """All rows of `steps` global batches, and their targets; masked: prompts of unequal lengths are no targets."""
    generator = torch.Generator().manual_seed(1234)
    tokens = torch.randint(VOCABULARY, (steps * ROWS, LENGTH + 1), generator=generator)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    if masked:
        prompts = torch.randint(LENGTH - 2, (steps * ROWS, 1), generator=generator)
        targets[torch.arange(LENGTH) < prompts] = -100
    return inputs, targets


def cross_entropy(logits: Tensor, targets: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction=reduction)

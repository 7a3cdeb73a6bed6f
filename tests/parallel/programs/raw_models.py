"""Models whose passes torch refuses where a plan divides their values, though one device runs them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Blocks(nn.Module):
    """Two attention layers with `between` in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(11, 8)
        self.first, self.second = Attention(), Attention()
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.between(self.first(self.emb(tokens)))))

    def between(self, x: Tensor) -> Tensor:
        return x


class EmbeddingAsMatrix(Blocks):
    def between(self, x: Tensor) -> Tensor:
        return x + F.softmax(x @ self.emb.weight.t(), -1) @ self.emb.weight


class GradientInForward(Blocks):
    def between(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(x.square().sum(), x, create_graph=True)
        return x + gradient


class Counted(Blocks):
    n: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.ones(()))

    def between(self, x: Tensor) -> Tensor:
        self.n += 1
        return x / self.n


class TiedLast(Blocks):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.emb(tokens)))) + self.second.out(self.emb.weight).sum()


class TiedDirect(Blocks):
    def forward(self, tokens: Tensor) -> Tensor:
        return self.second(self.first(self.emb(tokens))) @ self.emb.weight.t()


class OwnBackward(Blocks):
    def between(self, x: Tensor) -> Tensor:
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            inner.pow(3).sum().backward()
        assert inner.grad is not None
        return x + inner.grad


class EvenEmbedding(EmbeddingAsMatrix):
    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(12, 8)


class Refused(Blocks):
    def between(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:  # and not when it is traced
            raise RuntimeError("my own check")
        return x

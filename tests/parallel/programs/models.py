"""The model between whose attention layers a statement of statements.py runs, its data and its loss."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.parallel.programs.statements import LENGTH, STATEMENTS, WIDTH

VOCABULARY, BATCH = 13, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        query, key, value = (
            part.view(batch, length, 2, width // 2).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(query, key, value)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.3)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.blocks[0](self.table(tokens) + self.positions)
        x = STATEMENTS[self.name](x, tokens, self)
        scores: Tensor = self.head(self.blocks[1](x))
        return scores


def make_model(name: str) -> Model:
    torch.manual_seed(0)
    return Model(name).double()


def make_batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, LENGTH)
    return [
        (torch.randint(VOCABULARY, shape, generator=generator), torch.randint(VOCABULARY, shape, generator=generator))
        for _ in range(3)
    ]


def loss_of(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

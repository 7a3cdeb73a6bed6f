"""Small models and a planted fault for the tests of checks before training."""

from typing import Any

import torch
from torch import Tensor, nn

from meshwright.proof.before_training.training import Training
from meshwright.train.session import Session
from tests.proof.before_training import helper


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(helper.activate(self.up(x)))


class Blocks(nn.Module):
    """A model of equal blocks, whose forward pass calls a function of another file."""

    def __init__(self, blocks: int = 6, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x))


class FollowsBatch(nn.Module):
    """Subtracts a center that follows the batches, as DINO's teacher does. `kind` is what else changes state."""

    def __init__(self, kind: str = "buffer") -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(8, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("center", torch.zeros(3))
        self.register_buffer("count", torch.zeros(()))
        self.center: Tensor
        self.count: Tensor
        self.last: Any = None
        self.mean: Any = 0.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.count += 1  # the same on every rank
        self.last = y.detach()  # written before it is read
        if self.kind == "buffer":
            self.center.mul_(0.9).add_(0.1 * y.detach().mean(0))
        if self.kind == "attribute":
            y = y - self.mean
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean()
        return y - self.center + self.norm(y)


def training(model: nn.Module | None = None, **options: Any) -> Training:
    torch.manual_seed(0)
    model = model or Blocks()
    batch = (torch.randn(8, 8), torch.randint(3, (8,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return Training(model, optimizer, nn.functional.cross_entropy, batch, **options)


def scale_gradients_of_divided_models(patch: Any) -> None:
    """Plants a fault: sessions of plans with a tensor or a context axis make their gradients larger. One device, which
    has no session, does not."""
    update = Session._update

    def wrong_update(session: Session) -> bool:
        if max(session.plan.axes.tensor, session.plan.axes.context) > 1:
            for parameter in session.module.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(1.01)
        return update(session)

    patch.setattr(Session, "_update", wrong_update)


def samples() -> list[tuple[Tensor, int]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(8, generator=generator), number % 3) for number in range(16)]

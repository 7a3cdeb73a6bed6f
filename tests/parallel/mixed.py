"""A model with everything that makes sharding hard, and its training on one process for several data ranks."""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Rows that no axis divides, a single number, BatchNorm, and a weight that some ranks do not use."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(5, 7)
        self.narrow = nn.Linear(7, 5, bias=False)  # in front of BatchNorm its gradient would be zero
        self.norm = nn.BatchNorm1d(5)
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.sometimes = nn.Linear(5, 5, bias=False)
        self.never = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        out = self.gate * self.norm(self.narrow(self.wide(x).tanh()))
        if x.detach().sum() > 0:
            out = out + self.sometimes(x)
        return x + out


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.again = nn.Linear(5, 5, bias=False)
        self.tied = nn.Linear(5, 5)
        self.tied.weight = self.again.weight
        last = self.blocks[2]
        assert isinstance(last, Block)
        last.sometimes.weight = self.again.weight  # tied from outside into a block
        self.frozen = nn.Sequential(nn.Linear(5, 5), nn.Tanh()).requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(5, 3)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(self.frozen(self.scale * self.tied(self.again(x)))) + x.mean()
        return out


def mixed() -> Mixed:
    torch.manual_seed(3)
    return Mixed().double()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """With weight decay: a gradient of zero is not the same as none."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05, weight_decay=0.1)


def batch(step: int, data_rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * data_rank + microbatch)
    return torch.randn(4 + data_rank % 2, 6, generator=generator, dtype=torch.float64) + (data_rank % 2 - 0.5)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out: Tensor = model(x)
    return out.square().mean()


StateAndGradients = tuple[dict[str, Tensor], dict[str, Tensor]]


def train_in_one_process(steps: int, data_ranks: int, microbatches: int) -> StateAndGradients:
    """The weights and the last gradients. BatchNorm's statistics are those of data rank 0, as with DDP."""
    copies = [deepcopy(mixed()) for _ in range(data_ranks)]
    optimizers = [optimizer_of(model) for model in copies]
    for step in range(steps):
        for rank, model in enumerate(copies):
            for buffer, first in zip(model.buffers(), copies[0].buffers(), strict=True):
                buffer.copy_(first) if rank else None
            model.zero_grad()
        buffers = [buffer.clone() for buffer in copies[0].buffers()]
        for rank, model in enumerate(copies):
            for buffer, first in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(first)
            for microbatch in range(microbatches):
                loss_of(model, batch(step, rank, microbatch)).backward()
        for replicas in zip(*(model.parameters() for model in copies), strict=True):
            mean = _mean([p.grad for p in replicas])
            for parameter in replicas:
                parameter.grad = None if mean is None else mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    gradients = {name: p.grad for name, p in copies[0].named_parameters() if p.grad is not None}
    return dict(copies[0].state_dict()), gradients


def _mean(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [gradient for gradient in gradients if gradient is not None]
    return torch.stack(present).sum(0) / len(gradients) if present else None


def assert_equal_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        error = float((actual[name] - value).abs().max())
        assert error <= 1e-12 * float(value.abs().max()) + 1e-14, name

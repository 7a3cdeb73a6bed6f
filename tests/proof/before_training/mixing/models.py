"""Models that mix the samples of a batch, and models that do not although it may look so."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


def write_to_flat_view(x: Tensor) -> Tensor:
    x = x.clone()
    x.view(-1)[3] = 0
    return x


def pad_to_longest(x: Tensor) -> Tensor:
    """Leaves out the columns behind the last one that a sample of the batch uses, and adds them again as zeros."""
    longest = int((x.abs() > 1e-3).sum(1).max())
    return F.pad(x[:, :longest], (0, WIDTH - longest))


class MeanOfGradients(torch.autograd.Function):
    """Returns its input; its gradient is that of each sample and the mean over all of them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient + gradient.mean(0)


def with_hook(x: Tensor, hook: Callable[[Tensor], Tensor]) -> Tensor:
    y = x * 1
    if y.requires_grad:
        y.register_hook(hook)
    return y


IN_BACKWARD: dict[str, Callable[[Tensor], Tensor]] = {
    "hook normalizes each sample": lambda x: with_hook(x, lambda g: g / (1 + g.abs().sum(1, keepdim=True))),
    "hook clips large gradients": lambda x: with_hook(x, lambda g: g.clamp(-1, 1)),
    "hook divides by the norm": lambda x: with_hook(x, lambda g: g / g.norm()),
    "hook mixes": lambda x: with_hook(x, lambda g: g - g.mean(0)),
    "custom function mixes": MeanOfGradients.apply,
    "detached mean": lambda x: x + x.mean(0) - x.mean(0).detach(),
}
MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "roll": lambda x: x + x.roll(2, 0),
    "roll of the flat batch": lambda x: x + 0.25 * x.roll(1),
    "mean": lambda x: x - x.mean(0),
    "largest number": lambda x: x / x.abs().max(),
    "number of samples": lambda x: x / len(x),
    "write": write_to_flat_view,
    "order": lambda x: x.masked_scatter(x > 0, torch.arange(x.numel()).to(x)),
    "attention": lambda x: x + (x @ x.T).softmax(-1) @ x,
    "statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "random numbers": lambda x: F.dropout(x, 0.5) + x.mean(0),
    "vmap": lambda x: torch.vmap(lambda column: column - column.mean(0), in_dims=1, out_dims=1)(x),
}
INDEPENDENT: dict[str, Callable[[Tensor], Tensor]] = {
    "pointwise": lambda x: x * 2,
    "norm of each sample": lambda x: F.normalize(x, dim=1),
    "transposed": lambda x: x.t().contiguous().t(),
    "dropout": lambda x: F.dropout(x, 0.5, training=True),
    "noise": lambda x: x + torch.randn_like(x),
    "trimmed": pad_to_longest,
    "choices that are seldom random": lambda x: x + (torch.rand_like(x[:, :1]) > 0.95),
    "linear hook": lambda x: with_hook(x, lambda g: -0.5 * g),
    "hook of each sample": lambda x: with_hook(x, lambda g: g - g.mean(1, keepdim=True)),
}


class Model(nn.Module):
    """BatchNorm and dropout, then `change`, then a last layer of zeros, which hides everything at the beginning."""

    def __init__(self, change: Callable[[Tensor], Tensor], returns: Callable[[Tensor], Any] = lambda y: y) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), nn.Tanh())
        self.inner = Inner(change)
        self.head = nn.Linear(WIDTH, 3)
        self.returns = returns
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Any:
        return self.returns(self.head(self.inner(self.first(x))))


class Inner(nn.Module):
    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)

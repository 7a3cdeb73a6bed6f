"""The optimizers of cases: torch's, and those that people bring, among them some that look at whole tensors."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


class _PerTensor(torch.optim.Optimizer):
    """An optimizer whose subclass says how a weight changes, given its gradient and its state."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    change = self.direction(weight, weight.grad + group["decay"] * weight, self.state[weight])
                    weight.sub_(group["lr"] * change)

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        raise NotImplementedError


class Lion(_PerTensor):
    """The sign of an average of gradients."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(weight))
        change = (0.9 * average + 0.1 * gradient).sign()
        average.mul_(0.99).add_(gradient, alpha=0.01)
        return change


class Lars(_PerTensor):
    """A step whose length is a part of the weight's norm."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        ratio = (1 + weight.norm()) / (1e-3 + gradient.norm())
        average = state.setdefault("average", torch.zeros_like(weight))
        average.mul_(0.9).add_(gradient * ratio)
        return average


class Lamb(_PerTensor):
    """Adam, with a step whose length is a part of the weight's norm."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(weight))
        square = state.setdefault("square", torch.zeros_like(weight))
        average.mul_(0.9).add_(gradient, alpha=0.1)
        square.mul_(0.9).addcmul_(gradient, gradient, value=0.1)
        change = average / (square.sqrt() + 1e-3)
        return change * (1 + weight.norm()) / (1e-2 + change.norm())


class Shampoo(_PerTensor):
    """Steps of whole matrices, multiplied by the inverse root of their gradients' products; others as SGD."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        if weight.dim() != 2:
            return gradient
        left = state.setdefault("left", torch.eye(weight.shape[0], dtype=weight.dtype) * 1e-2)
        left.add_(gradient @ gradient.t())
        values, vectors = torch.linalg.eigh(left)
        return vectors @ torch.diag(values.clamp(min=1e-3) ** -0.5) @ vectors.t() @ gradient


class MuonAndSgd(_PerTensor):
    """Matrices get an orthogonal step (five iterations of Newton and Schulz), others that of SGD."""

    def direction(self, weight: Tensor, gradient: Tensor, state: dict[str, Any]) -> Tensor:
        average = state.setdefault("average", torch.zeros_like(weight))
        average.mul_(0.9).add_(gradient)
        if weight.dim() != 2:
            return average
        x = average / (average.norm() + 1e-2)
        for _ in range(5):
            product = x @ x.t()
            x = 1.5 * x - 0.5 * product @ x
        return x


def _two_groups(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    return [{"params": matrices, "lr": 0.05, "weight_decay": 0.1}, {"params": others, "lr": 0.1}]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


_OPTIM = torch.optim
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: _OPTIM.SGD(_trained(m), lr=0.1),
    "SGD momentum": lambda m: _OPTIM.SGD(_trained(m), lr=0.05, momentum=0.9),
    "SGD nesterov": lambda m: _OPTIM.SGD(_trained(m), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD groups": lambda m: _OPTIM.SGD(_two_groups(m), lr=0.05, momentum=0.5),
    "AdamW": lambda m: _OPTIM.AdamW(_trained(m), lr=0.01, eps=1e-4, weight_decay=0.1),
    "AdamW groups": lambda m: _OPTIM.AdamW(_two_groups(m), lr=0.01, eps=1e-4),
    "Adam amsgrad": lambda m: _OPTIM.Adam(_trained(m), lr=0.01, eps=1e-4, amsgrad=True),
    "Adagrad": lambda m: _OPTIM.Adagrad(_trained(m), lr=0.02, eps=1e-4),
    "RMSprop": lambda m: _OPTIM.RMSprop(_trained(m), lr=0.005, eps=1e-4, momentum=0.5),
    "Adafactor": lambda m: _OPTIM.Adafactor(_trained(m), lr=0.01),
    "Adadelta": lambda m: _OPTIM.Adadelta(_trained(m), lr=0.5, eps=1e-4),
    "NAdam": lambda m: _OPTIM.NAdam(_trained(m), lr=0.01, eps=1e-4),
    "Lion": lambda m: Lion(_trained(m), lr=0.005, decay=0.1),
    "LARS": lambda m: Lars(_trained(m), lr=0.002),
    "LAMB": lambda m: Lamb(_trained(m), lr=0.005),
    "Shampoo": lambda m: Shampoo(_trained(m), lr=0.02),
    "Muon": lambda m: MuonAndSgd(_trained(m), lr=0.02),
}
ELEMENTWISE = ("SGD", "SGD momentum", "SGD nesterov", "SGD groups")  # drawn most often: their steps follow gradients

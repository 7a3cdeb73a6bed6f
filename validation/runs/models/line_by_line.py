"""The Adam of NVIDIA's BERT example for fine-tuning in fp32 (`BertAdam` in its optimization.py). It updates one tensor
after another, with one or two operators for each line of its code. Only its cost matters here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_LEARNING_RATE, _DECAY, _BETA1, _BETA2, _EPSILON = 3e-5, 0.01, 0.9, 0.999, 1e-6


class LineByLine(torch.optim.Optimizer):
    """Adam with a separate operator for each line of its update, for each parameter."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad)

    def _update(self, parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        mean, square = state["mean"], state["square"]
        mean.mul_(_BETA1).add_(gradient, alpha=1 - _BETA1)
        square.mul_(_BETA2).addcmul_(gradient, gradient, value=1 - _BETA2)
        change = mean / (square.sqrt() + _EPSILON)
        change += _DECAY * parameter
        parameter.add_(-(_LEARNING_RATE * change))

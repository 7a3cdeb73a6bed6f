"""Adam as NVIDIA's BERT example has it for fine-tuning in fp32 (`BertAdam` in its optimization.py): one tensor after
another, and each line an operator of its own, or two. Only what it costs matters here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_RATE, _DECAY, _FIRST, _SECOND, _SMALL = 3e-5, 0.01, 0.9, 0.999, 1e-6


class LineByLine(torch.optim.Optimizer):
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
        mean.mul_(_FIRST).add_(gradient, alpha=1 - _FIRST)
        square.mul_(_SECOND).addcmul_(gradient, gradient, value=1 - _SECOND)
        change = mean / (square.sqrt() + _SMALL)
        change += _DECAY * parameter
        parameter.add_(-(_RATE * change))

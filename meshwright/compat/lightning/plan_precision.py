"""`PlanPrecision`: the precision plugin of the Trainer's strategy. The plan decides the precision; the plugin runs
backward passes, and clips gradients that may be shards."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from meshwright.compat.lightning.parts import ModuleParts


class PlanPrecision(Precision):
    """Lightning's plugin without precision of its own. `parts` is None until the strategy is set up. `loss_weight` is
    this rank's share of the batch's samples times the number of ranks; 1 if all ranks have equally many."""

    def __init__(self) -> None:
        self.parts: ModuleParts | None = None
        self.loss_weight = 1.0

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.parts is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        weighted = tensor if self.loss_weight == 1 else tensor * self.loss_weight
        with self.parts.backward_pass():
            super().backward(weighted, model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.parts is not None
        self.parts.clip_norm(list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.parts is not None
        self.parts.clip_value(list(self.main_params(optimizer)), clip_val)

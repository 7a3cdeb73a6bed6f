"""`PlanPrecision`: the precision plugin of the Trainer's strategy. The plan decides the precision; the plugin runs
backward passes, and clips gradients that may be shards."""

from typing import Any

import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor

from meshwright.parallel.clip import clip_values_
from meshwright.train.drive.driver import Driver


class PlanPrecision(Precision):
    """Lightning's plugin without precision of its own. `driver` is None until the strategy is set up. `loss_weight` is
    this rank's share of the batch's samples times the number of ranks; 1 if all ranks have equally many."""

    def __init__(self) -> None:
        self.driver: Driver | None = None
        self.loss_weight = 1.0

    def backward(self, tensor: Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.driver is None:
            super().backward(tensor, model, optimizer, *args, **kwargs)
            return
        weighted = tensor if self.loss_weight == 1 else tensor * self.loss_weight
        with self.driver.backward_pass():
            super().backward(weighted, model, optimizer, *args, **kwargs)

    def clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        assert self.driver is not None
        self.driver.clip_norm(list(self.main_params(optimizer)), clip_val)

    def clip_grad_by_value(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        clip_values_(self.main_params(optimizer), clip_val)

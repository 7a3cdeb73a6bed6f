"""`Training`: what a check before training gets of a job or of a user's script."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.model_io.batch import target_key
from meshwright.train.loss.loss import LossFunction


@dataclass(frozen=True)
class Training:
    """A model with its optimizer, its loss and a batch. The model may be on the meta device. `build` then returns it
    with weights, without the modules of the given names; None for a model that has its weights."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction | None
    sample_batch: Any
    target: str | None = None
    clip_norm: float | None = None
    seed: int = 0
    timeout_s: float = 600
    build: Callable[[tuple[str, ...]], nn.Module] | None = None

    @property
    def target_key(self) -> str | None:
        """The key of the target in batches that are dicts, as `split_batch` takes it."""
        return target_key(self.target, self.loss is not None)

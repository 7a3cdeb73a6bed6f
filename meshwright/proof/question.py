"""`Question`: what shall be shown equal, as the ranks and the reference both take it."""

from collections.abc import Callable
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any, Literal

import torch
from torch import nn

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.loss import LossFunction
from meshwright.train.session import MakeSchedule

DTYPES = {"fp64": torch.float64, "fp32": torch.float32}


@dataclass(frozen=True)
class Plant:
    """A fault on purpose: gradients of the parameters that `parameter` matches are multiplied by `factor`, after the
    ranks have combined them and before the optimizer sees them. `rank` null: on every rank; from step `step` on."""

    kind: Literal["scale_gradients"] = "scale_gradients"
    factor: float = 1.01
    rank: int | None = None
    parameter: str = "*"
    step: int = 1

    def spoil(self, module: nn.Module, rank: int, step: int) -> None:
        if step < self.step or self.rank not in (None, rank):
            return
        for name, parameter in module.named_parameters():
            if parameter.grad is not None and fnmatch(name, self.parameter):
                parameter.grad.mul_(self.factor)


@dataclass(frozen=True)
class OwnModel:
    """A user's model with its own data, where there is no job. `optimizer` is a template, as for `parallelize`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: LossFunction | None
    data: Any
    global_batch: int
    collate: Callable[[list[Any]], Any] | None = None
    schedule: MakeSchedule | None = None
    clip_norm: float | None = None
    seed: int = 0
    target: str | None = None
    timeout_s: float = 600


@dataclass(frozen=True)
class Question:
    """`plan` is what the ranks run: one that fits on them."""

    subject: Job | OwnModel
    plan: Plan
    steps: int = 3
    dtype: str = "fp64"
    dropout: bool = False
    plant: Plant | None = None

    @property
    def timeout_s(self) -> float:
        return self.subject.train.timeout_s if isinstance(self.subject, Job) else self.subject.timeout_s

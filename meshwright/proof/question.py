"""`Question`: what shall be shown equal, as the ranks and the reference both take it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.proof.fault import Fault
from meshwright.train.session import MakeSchedule
from meshwright.train.step.loss import LossFunction

# What models are compared in; `plan`: fp32 weights, and products as the plan rounds them.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "plan": torch.float32}
# What of gradients is left out of a comparison: short factors of them, and steps that ranks take alone.
PLAIN = {"powersgd_rank": 0, "local_steps": 1}


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
    plant: Fault | None = None

    @property
    def rounds(self) -> bool:
        """Whether the comparison is in the plan's own precision."""
        return self.dtype == "plan"

    @property
    def ran(self) -> Plan:
        """The plan as ranks run it: in a precision of the comparison's, the model runs in the types it has; and without
        what trains otherwise than one device by design."""
        plan = self.plan.model_copy(update={"gradients": self.plan.gradients.model_copy(update=PLAIN)})
        if self.rounds:
            return plan
        numerics = plan.numerics.model_copy(update={"precision": "fp32", "cast": "operators"})
        gradients = plan.gradients.model_copy(update={"precision": "fp32"})
        return plan.model_copy(update={"numerics": numerics, "gradients": gradients})

    @property
    def timeout_s(self) -> float:
        return self.subject.train.timeout_s if isinstance(self.subject, Job) else self.subject.timeout_s

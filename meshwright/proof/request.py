"""`ProofRequest`: describes what to compare. The ranks and the one-device reference receive the same request."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.loss.loss import LossFunction
from meshwright.train.session import MakeSchedule, Session

# The dtype of the weights, by the precision of the comparison. `plan` is a comparison in the plan's own precision, in
# which weights are fp32 and products are rounded as the plan says.
COMPARISON_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "plan": torch.float32}
# The weights that both sides start from: those of the job or model, or others that are drawn (`random_start.py`).
STARTS = ("job", "random")
# Values of `plan.gradients` that every comparison uses. They switch off low-rank compression and local steps, because
# with these a plan trains differently from one device by design.
COMPARED_GRADIENT_OPTIONS = {"powersgd_rank": 0, "local_steps": 1}


@dataclass(frozen=True)
class UserModel:
    """A user's model with its data, for a proof without a job. `optimizer` is a template: each rank builds an optimizer
    of the same kind for its own parameters."""

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
class ProofRequest:
    """What to train (`subject`), under which plan, and how to compare it with one device.

    `plan` fits on the ranks that will run it. `dtype` is a key of `COMPARISON_DTYPES`. With `dropout`, dropout stays
    on. Every rank calls `prepare_session` with its session before the first step, so that a test can break the training
    on purpose; the function must be picklable. `start` is one of `STARTS`. In the step
    `operators_of_step`, ranks record what the operators of the model return, so that the first one that differs can be
    named; None for no step.
    """

    subject: Job | UserModel
    plan: Plan
    steps: int = 3
    dtype: str = "fp64"
    dropout: bool = False
    prepare_session: Callable[[Session], None] | None = None
    start: str = "job"
    operators_of_step: int | None = None

    @property
    def in_plan_precision(self) -> bool:
        """Whether the comparison runs in the plan's own precision."""
        return self.dtype == "plan"

    @property
    def executed_plan(self) -> Plan:
        """The plan as the ranks run it: with `COMPARED_GRADIENT_OPTIONS`. Unless the comparison runs in the plan's own
        precision, the plan's precision is replaced by fp32, which means no casts: the model runs in the dtype of its
        weights."""
        plan = self.plan.model_copy(
            update={"gradients": self.plan.gradients.model_copy(update=COMPARED_GRADIENT_OPTIONS)}
        )
        if self.in_plan_precision:
            return plan
        numerics = plan.numerics.model_copy(update={"precision": "fp32", "cast": "operators"})
        gradients = plan.gradients.model_copy(update={"precision": "fp32"})
        return plan.model_copy(update={"numerics": numerics, "gradients": gradients})

    @property
    def lifts_casts(self) -> bool:
        """Whether the model's own conversions to fp32 become conversions to fp64. Compiled code cannot be changed so
        while it runs."""
        return self.dtype == "fp64" and self.plan.compute.compile == "none"

    @property
    def timeout_s(self) -> float:
        return self.subject.train.timeout_s if isinstance(self.subject, Job) else self.subject.timeout_s

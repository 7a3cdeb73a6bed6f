"""The check before training, for the loops of other libraries: they compute their losses themselves."""

from typing import Any

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import join
from meshwright.proof.before_training.before_training import check_in_world
from meshwright.proof.before_training.training import Training


def check_in_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, batch: Any, plan: Plan, device_type: str
) -> None:
    """Raises `UnequalPlan` on every rank if the plan does not train the same model as one device. The model is one
    that returns its loss, or a loss stands in for that of the loop. Without a `batch`, nothing is checked. All ranks
    call this together, before the plan changes the model."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if batch is None or not parameters or plan.world_size == 1:
        return
    world = join(device_type, _TIMEOUT_S)
    template = optimizer or torch.optim.SGD(parameters, lr=0.1)
    replicas = Plan(axes=Axes(replicate=world.size))
    training = Training(model, template, None, batch)
    check_in_world(training, plan, world, skip="check=False", suggest=lambda: replicas)


_TIMEOUT_S = 600.0  # of a process group, if the library has not made one

"""`mw.parallelize`: checks the plan against one device, and returns the session that trains under it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import World
from meshwright.proof.before_training.before_training import check_in_world
from meshwright.proof.before_training.mixing.check import FirstBatchCheck, first_batch_check
from meshwright.proof.before_training.training import Training
from meshwright.train.loss.loss import LossFunction
from meshwright.train.parallelize import parallelize as parallelize_unchecked
from meshwright.train.session import Session


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    loss: LossFunction | None = None,
    plan: Plan | Mapping[str, Any] | str | Path | None = None,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    on_nonfinite: Literal["ignore", "skip"] = "ignore",
    seed: int = 0,
    target: str | None = None,
    device: str | None = None,
    timeout_s: float = 600,
    sample_batch: Any = None,
    check: bool = True,
) -> Session:
    """Returns a session that trains the model under a plan: a `Plan`, its groups as a dict, or the path of a plan file.
    Without a plan, every rank is a replica. Each model of a script gets a session of its own. If the script has made a
    process group, the session uses it. All ranks call this together.

    `optimizer` is a template: the session builds a new optimizer of the same class, groups and options for the parallel
    model, and matches parameters by name. Calling `step` of the given optimizer then raises an error. It is None for a
    model that is not trained, such as a teacher. `schedule` is called with the new optimizer and returns its
    learning-rate schedule; one that needs a metric is stepped by `session.step_schedule(metric)`. `loss` is None for
    models that return their loss, and for loops that compute it from `session.model(...)`. With `on_nonfinite="skip"`,
    the update of a step whose loss or gradients are NaN or infinite is left out on all ranks and counted in the
    session's `skipped_steps`. `target` is the key of the target in batches that are dicts. `device` is `cuda` or `cpu`;
    None means `cuda` if there is a GPU. `sample_batch`, a batch of any size, is needed for plans that split or cut the
    model, or compute its loss in chunks. `timeout_s` is how long a rank waits for other ranks before it fails; a
    process group that the script has made keeps its own.

    With `check`, two small steps under the plan are compared with one device first, if the plan divides or cuts the
    model and was not found equal before, and the error `UnequalPlan` says what differs (docs/prove.md). The model is
    not changed by it.

    >>> import torch, meshwright as mw
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> session = mw.parallelize(model, optimizer, loss=torch.nn.functional.mse_loss)
    >>> loss = session.step((torch.ones(8, 4), torch.zeros(8, 1)))
    >>> session.steps
    1
    """

    first_batch: FirstBatchCheck | None = None

    def check_plan(plan: Plan, world: World) -> None:
        nonlocal first_batch
        if optimizer is None:  # nothing is trained
            return
        training = Training(model, optimizer, loss, sample_batch, target, clip_norm, seed, timeout_s)
        if sample_batch is None:  # nothing of the model is divided, but batches may be
            first_batch = first_batch_check(training, plan, world, "check=False")
            return
        check_in_world(training, plan, world, skip="check=False", suggest=lambda: Plan(axes=Axes(replicate=world.size)))

    session = parallelize_unchecked(
        model,
        optimizer,
        loss=loss,
        plan=plan,
        schedule=schedule,
        clip_norm=clip_norm,
        on_nonfinite=on_nonfinite,
        seed=seed,
        target=target,
        device=device,
        timeout_s=timeout_s,
        sample_batch=sample_batch,
        check_plan=check_plan if check else None,
    )
    session.first_batch_check = first_batch
    return session

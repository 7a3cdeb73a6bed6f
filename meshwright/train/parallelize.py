"""`parallelize`: a session for people with their own loop, under torchrun, in ranks of ours, or alone."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.launch.world import join
from meshwright.plan import Plan
from meshwright.train.session import Session
from meshwright.train.step.loss import LossFunction
from meshwright.train.step.optimizer import rebuild_optimizer


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: LossFunction | None = None,
    plan: Plan | None = None,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    target: str | None = None,
    device: str | None = None,
    timeout_s: float = 600,
    sample_batch: Any = None,
) -> Session:
    """Puts a model under a plan; without one, every rank is a replica. A plan that splits or cuts the model wants to
    see a batch of any size, `sample_batch`.

    `optimizer` is a template: its class, groups and options are made again, by parameter name, on the parallel
    model, and the given object can no longer be stepped. `schedule` makes a schedule from the new optimizer.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    world = join(kind, timeout_s)
    # Names, not objects, link the template to the parallel model: a plan may replace parameters.
    names = {id(p): name for name, p in model.named_parameters()}
    session = Session(
        model,
        lambda parameters: rebuild_optimizer(optimizer, names, parameters),
        loss=loss,
        plan=plan or Plan.model_validate({"axes": {"replicate": world.size}}),
        world=world,
        make_schedule=schedule,
        clip_norm=clip_norm,
        seed=seed,
        target=target,
        sample=sample_batch,
    )
    _mark_used(optimizer)
    return session


def _mark_used(optimizer: torch.optim.Optimizer) -> None:
    def used(*_: Any, **__: Any) -> NoReturn:
        raise RuntimeError("this optimizer was a template for parallelize(): call session.step(batch) instead")

    optimizer.step = used  # type: ignore[method-assign]

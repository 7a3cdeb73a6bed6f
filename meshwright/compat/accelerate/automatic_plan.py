"""`Accelerator(plan="auto")`: the fastest plan for a model that returns its loss."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright.auto.choose import best_plan
from meshwright.compat.accelerate.plan_argument import check_plan
from meshwright.compat.check import check_in_loop
from meshwright.compat.loaders import batch_of_first_samples
from meshwright.compat.plan_argument import ignoring_accumulation, without_accumulation
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.proof.before_training.before_training import fastest_equal_plan


def choose_plan(
    objects: tuple[Any, ...], ranks: int, split_batches: bool, device_type: str, *, checks: bool = True
) -> Plan:
    """Returns the fastest plan that loops of Accelerate can run, for the model among the objects that one call of
    `prepare` was given. Where none is found, a warning says why, and every rank is a replica. With `checks`, plans that
    train another model than one device are left out. All ranks call this together."""
    model, loader, optimizer = _parts(objects)
    if model is None or loader is None:
        raise InputError(
            "plan is 'auto', which needs a batch: give the model and its DataLoader to one call of prepare, or give"
            " plan=mw.best_plan(model, sample_batch, global_batch=…)"
        )
    try:
        batch = batch_of_first_samples(loader) if loader.batch_size else None
        if batch is None:
            raise InputError("the loader has no samples by number, or no batch size: give plan=mw.best_plan(…)")
        global_batch = (loader.batch_size or 1) * (1 if split_batches else ranks)

        def search(refuse: Callable[[Plan], None]) -> Plan:
            def check(plan: Plan) -> None:
                check_plan(plan)
                refuse(plan)

            settings: dict[str, Any] = {
                "global_batch": global_batch,
                "optimizer": optimizer,
                "device": device_type,
                "tune": 0,
            }
            return without_accumulation(best_plan(model, batch, **settings, check=ignoring_accumulation(check)))

        def check_here(plan: Plan) -> None:
            if checks:
                check_in_loop(model, optimizer, batch, plan, device_type)

        return fastest_equal_plan(search, check_here)
    except MeshwrightError as error:
        warnings.warn(f"plan 'auto': every rank is a replica, because: {error}", stacklevel=4)
        return Plan(axes=Axes(replicate=ranks))


def check_before_training(objects: tuple[Any, ...], plan: Plan, device_type: str) -> None:
    """Raises `UnequalPlan` if the plan does not train the model among the objects as one device does. Without a loader
    among them that has samples by number, nothing is checked. All ranks call this together."""
    model, loader, optimizer = _parts(objects)
    if model is not None and loader is not None and (loader.batch_size or loader.batch_sampler):
        check_in_loop(model, optimizer, batch_of_first_samples(loader), plan, device_type)


def _parts(objects: tuple[Any, ...]) -> tuple[nn.Module | None, Any, torch.optim.Optimizer | None]:
    """Returns the model, the loader and the optimizer among the objects, each None if there is none."""
    model = next((item for item in objects if isinstance(item, nn.Module)), None)
    loader = next((item for item in objects if isinstance(item, DataLoader)), None)
    return model, loader, next((item for item in objects if isinstance(item, torch.optim.Optimizer)), None)

"""`Accelerator(plan="auto")`: the fastest plan for a model that returns its loss."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from meshwright.auto.choose import best_plan
from meshwright.compat.accelerate.plan_argument import check_plan
from meshwright.compat.loaders import batch_of_first_samples
from meshwright.compat.plan_argument import ignoring_accumulation, without_accumulation
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes


def choose_plan(objects: tuple[Any, ...], ranks: int, split_batches: bool, device_type: str) -> Plan:
    """Returns the fastest plan that loops of Accelerate can run, for the model among the objects that one call of
    `prepare` was given. Where none is found, a warning says why, and every rank is a replica. All ranks call this
    together."""
    model = next((item for item in objects if isinstance(item, nn.Module)), None)
    loader = next((item for item in objects if isinstance(item, DataLoader)), None)
    optimizer = next((item for item in objects if isinstance(item, torch.optim.Optimizer)), None)
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
        check = ignoring_accumulation(check_plan)
        plan = best_plan(model, batch, global_batch=global_batch, optimizer=optimizer, device=device_type, check=check)
        return without_accumulation(plan)
    except MeshwrightError as error:
        warnings.warn(f"plan 'auto': every rank is a replica, because: {error}", stacklevel=4)
        return Plan(axes=Axes(replicate=ranks))

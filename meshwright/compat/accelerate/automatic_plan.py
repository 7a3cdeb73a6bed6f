"""`Accelerator(plan="auto")`: the fastest plan for a model that returns its loss."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from meshwright.auto.choose import best_plan
from meshwright.compat.accelerate.plan_argument import check_plan
from meshwright.data.randomness import preserve_generators
from meshwright.errors import InputError, MeshwrightError
from meshwright.plan import Axes, Plan


def choose_plan(objects: tuple[Any, ...], ranks: int, split_batches: bool, device_type: str) -> Plan:
    """Returns the fastest plan for the model among the objects that one call of `prepare` was given. Where none is
    found, or loops of Accelerate cannot run it, a warning says why, and every rank is a replica. All ranks call this
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
        batch = _sample_batch(loader)
        global_batch = (loader.batch_size or 1) * (1 if split_batches else ranks)
        plan = best_plan(model, batch, global_batch=global_batch, optimizer=optimizer, device=device_type)
        check_plan(plan)
    except MeshwrightError as error:
        warnings.warn(f"plan 'auto': every rank is a replica, because: {error}", stacklevel=4)
        return Plan(axes=Axes(replicate=ranks))
    return plan


def _sample_batch(loader: DataLoader[Any]) -> Any:
    """A batch of the first samples. The loader's sampler draws nothing for it."""
    if isinstance(loader.dataset, IterableDataset) or not loader.batch_size:
        raise InputError("the loader has no samples by number, or no batch size: give plan=mw.best_plan(…)")
    with preserve_generators():
        count = min(loader.batch_size, len(loader.dataset))  # type: ignore[arg-type]
        return loader.collate_fn([loader.dataset[number] for number in range(count)])

"""Jobs whose model is a LightningModule. They have no optimizer, because the module configures it, and `data.train` may
be a LightningDataModule. This file does not import Lightning, because other jobs need not have it."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.user.call import load

# What stands in such a job in place of the fields that a job needs and the module has.
_OPTIMIZER = "meshwright.compat.lightning_job:configured_by_module"
MODULE_LOADERS = "meshwright.compat.lightning_job:loaders_of_module"


def load_module_job(path: str | Path, settings: Sequence[str], *, has_data: bool) -> Job | None:
    """Reads a job file that has no optimizer. It takes the optimizer from the LightningModule that the file names and,
    if the file has no data, the data, too. Returns None if the model is no LightningModule."""
    filled = [f"optimizer.call={_OPTIMIZER}", *([] if has_data else [f"data.train.call={MODULE_LOADERS}"])]
    job = load_job(path, [*settings, *filled])
    return job if _is_lightning_module(load(job.model.call)) else None


def check_module_job(job: Job) -> None:
    """Raises an `InputError` if the job has a field that the LightningModule decides, or that Lightning's loop does not
    have."""
    fields = {
        "loss": (job.loss, "training_step returns the loss"),
        "schedule": (job.schedule, "configure_optimizers returns the schedules"),
        "metrics": (job.metrics, "validation_step logs the metrics"),
        "data.eval": (job.data.eval, "val_dataloader returns the loader"),
        "data.weights": (job.data.weights, "give the loader a sampler"),
        "data.sampler": (job.data.sampler, "give the loader a sampler"),
        "train.weights": (job.train.weights, "load them in the module"),
        "train.freeze": (job.train.freeze, "freeze them in the module"),
        "checkpoint.best": (job.checkpoint.best, "choose one of the checkpoints by metrics.jsonl"),
        "checkpoint.copy_to": (job.checkpoint.copy_to, "Lightning's checkpoints stay in the run folder"),
    }
    for field, (value, instead) in fields.items():
        if value:
            raise InputError(f"{field} is {value!r:.60}, but the model is a LightningModule: leave it out, {instead}")
    for field, value, default in (
        ("train.on_nonfinite", job.train.on_nonfinite, "stop"),
        ("train.on_spike", job.train.on_spike, "ignore"),
    ):
        if value != default:
            raise InputError(f"{field} is {value}, which the loop of a LightningModule does not have: leave it out")


def configured_by_module(*_: Any, **__: Any) -> NoReturn:
    raise InputError("the optimizers of this job are configured by its LightningModule: only `train` can run it")


def loaders_of_module(*_: Any, **__: Any) -> NoReturn:
    raise InputError("the data of this job are loaded by its LightningModule: only `train` can run it")


def _is_lightning_module(target: Any) -> bool:
    names = {f"{kind.__module__}.{kind.__name__}" for kind in inspect.getmro(target)} if inspect.isclass(target) else ()
    return "lightning.pytorch.core.module.LightningModule" in names

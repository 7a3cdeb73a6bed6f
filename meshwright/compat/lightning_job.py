"""Jobs whose model is a LightningModule. They have no optimizer, because the module configures it, and `data.train` may
be a LightningDataModule. This file does not import Lightning, because other jobs need not have it."""

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from meshwright.call import load
from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.files.yaml_file import read_mapping
from meshwright.job import Job, load_job

# What stands in such a job in place of the fields that a job needs and the module has.
_OPTIMIZER = "meshwright.compat.lightning_job:configured_by_module"
MODULE_LOADERS = "meshwright.compat.lightning_job:loaders_of_module"


def load_train_job(path: str | Path, settings: Sequence[str]) -> Job:
    """Reads a job file as `load_job` does. If it has no optimizer and its model is a LightningModule, the fields that
    the module has are filled in."""
    raw = read_mapping(user_path(path, "the job file"), "job")
    if "optimizer" in raw or any(setting.startswith("optimizer") for setting in settings):
        return load_job(path, settings)
    filled = [f"optimizer.call={_OPTIMIZER}"]
    if "data" not in raw:
        filled.append(f"data.train.call={MODULE_LOADERS}")
    job = load_job(path, [*settings, *filled])
    return job if _is_lightning_module(load(job.model.call)) else load_job(path, settings)


def load_plain_job(path: str | Path, settings: Sequence[str], command: str) -> Job:
    """Reads a job file for a command other than `train`. Raises an `InputError` if its model is a LightningModule."""
    job = load_train_job(path, settings)
    if is_module_job(job):
        raise InputError(
            f"{path}: the model ({job.model.call}) is a LightningModule, which only `meshwright train` can run: for"
            f" `meshwright {command}`, write a job whose model is the network inside of it, with data, loss and"
            " optimizer"
        )
    return job


def is_module_job(job: Job) -> bool:
    """Whether the job's model is a LightningModule that configures its optimizers itself."""
    return job.optimizer.call == _OPTIMIZER


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

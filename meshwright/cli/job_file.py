"""The job file of a command. A file without an optimizer may be for the loop of another library, such as a
LightningModule, which only `train` can run; that library's room is loaded for such files only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from meshwright import doors
from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.files.yaml_file import read_mapping
from meshwright.job import Job, load_job
from meshwright.plan import Plan


def load_train_job(path: str | Path, settings: Sequence[str]) -> Job:
    """Reads a job file as `load_job` does. If it has no optimizer, and another library trains its model, that library
    fills in the missing fields."""
    raw = read_mapping(user_path(path, "the job file"), "job")
    if "optimizer" not in raw and not any(setting.startswith("optimizer") for setting in settings):
        for library in doors.names("job"):
            job: Job | None = doors.function("job", library)(path, settings, has_data="data" in raw)
            if job is not None:
                return job
    return load_job(path, settings)


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
    return job.optimizer.call in doors.names("train")


def train_module_job(
    job: Job, plan: Plan | Literal["auto"], cluster: str | None, resume: str, record: int
) -> dict[str, Any]:
    """Trains a job whose model is a LightningModule, and returns the result. `cluster` replaces that of the job, unless
    it is None."""
    try:
        train = doors.function("train", job.optimizer.call)
    except ImportError as error:
        raise InputError(str(error)) from None
    result: dict[str, Any] = train(job, plan, cluster, resume, record)
    return result

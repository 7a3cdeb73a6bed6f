"""`meshwright train --on ray`: trains a job in the workers of Ray Train on an existing Ray cluster."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.plan import Plan


def check_ray_options(on: str | None, workers: int | None, nodes: str | None, deepspeed: Path | None) -> None:
    """Raises an `InputError` if `--on` is no Ray cluster, or does not go with another option."""
    if on is None:
        if workers is not None:
            raise InputError(f"--workers {workers}: say where the workers are, with --on ray or --on ray://HOST:PORT")
        return
    if on != "ray" and not (on.startswith("ray://") and len(on) > len("ray://")):
        raise InputError(f"--on {on}: write ray for the Ray cluster of this machine, or ray://HOST:PORT")
    for name, value in (("--nodes", nodes), ("--deepspeed", deepspeed)):
        if value is not None:
            raise InputError(f"{name} {value} with --on {on}: leave out one of them")


def train_in_ray_workers(
    job: "Job",
    plan: "Plan | Literal['auto']",
    on: str,
    workers: int | None,
    cluster: str | None,
    resume: str,
    record: int,
    unproved: bool = False,
) -> dict[str, Any] | None:
    """Trains the job on the Ray cluster `on`. Returns the result of the run."""
    from meshwright.cli.job_file import is_module_job
    from meshwright.processes.environment import read_environment

    if is_module_job(job):
        raise InputError(f"--on {on}: a LightningModule is trained by Lightning's Trainer, which --on does not start")
    environment = read_environment()
    if environment.launched:
        raise InputError(f"--on {on}: {environment.launcher} started this process as a rank: leave out --on")
    try:
        from meshwright.compat.ray.run import train_on_ray
    except ImportError as error:
        raise InputError(f"--on {on}: {error}") from None
    return train_on_ray(job, plan, on, workers, cluster, resume, record, unproved)

"""The command `train` for a job whose model is a LightningModule."""

from typing import Any, Literal

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan


def train_lightning_module(
    job: Job, plan: Plan | Literal["auto"], cluster: str | None, resume: str, record: int
) -> dict[str, Any]:
    """Trains the module and returns the result. `cluster` replaces that of the job, unless it is None."""
    from meshwright.cluster.detect import find_cluster
    from meshwright.launch.environment import read_environment

    if read_environment().launched:
        raise InputError(
            "a launcher such as torchrun started this command, but the job's model is a LightningModule: start the"
            " command without a launcher, or use Trainer(strategy='meshwright') in a script of your own"
        )
    if record:
        raise InputError(f"--record {record} does not work for a LightningModule: leave it out")
    try:
        from meshwright.compat.lightning.run import train_module
    except ImportError as error:
        raise InputError(str(error)) from None
    return train_module(job, plan, find_cluster(cluster or job.cluster), resume)

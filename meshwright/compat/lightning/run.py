"""`train_module`, the work of `meshwright train` for a LightningModule: locks a run folder, starts the ranks, waits for
them, and returns the result. In each rank, rank.py runs Lightning's Trainer."""

from typing import Any, Literal

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local, find_cluster
from meshwright.compat.lightning.plan_argument import check_loop_plan
from meshwright.compat.lightning_job import check_module_job
from meshwright.errors import InputError, Stopped
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.environment import read_environment
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.train.check import check_devices, check_rank_count
from meshwright.train.output.folder import lock_run_folder, read_result, write_job_and_plan
from meshwright.train.run import DETERMINISTIC


def train(job: Job, plan: Plan | Literal["auto"], cluster: str | None, resume: str, record: int) -> dict[str, Any]:
    """Trains the module as the command `train` and returns the result. `cluster` replaces that of the job, unless it is
    None."""
    if read_environment().launched:
        raise InputError(
            "a launcher such as torchrun started this command, but the job's model is a LightningModule: start the"
            " command without a launcher, or use Trainer(strategy='meshwright') in a script of your own"
        )
    if record:
        raise InputError(f"--record {record} does not work for a LightningModule: leave it out")
    return train_module(job, plan, find_cluster(cluster or job.cluster), resume)


def train_module(job: Job, plan: Plan | Literal["auto"], cluster: Cluster, resume: str) -> dict[str, Any]:
    """Trains on this machine, and returns the content of result.json. With `auto`, every device is a replica. `resume`
    is that of `lock_run_folder`."""
    if plan == "auto":
        plan = Plan(axes=Axes(replicate=cluster.device_count))
    check(job, plan, cluster)
    locked_run = lock_run_folder(job, resume)
    folder = locked_run.folder
    threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
    try:
        write_job_and_plan(folder, job, plan)
        launch(
            "meshwright.compat.lightning.rank",
            [str(folder.path.resolve()), cluster.kind],
            RankSettings(
                plan.processes, cluster.kind, threads, job.train.restarts, job.train.grace_s, spare=job.train.spare
            ),
            folder.logs,
            DETERMINISTIC if job.train.deterministic else {},
        )
    except Stopped:
        pass  # the ranks may have finished all the same
    finally:
        locked_run.lock.close()
    result = read_result(folder)
    if result is None:
        raise Stopped(f"{folder.path}: stopped before the end; the same command resumes it")
    return result


def check(job: Job, plan: Plan, cluster: Cluster) -> None:
    """Raises an `InputError` of one line if the job cannot run under the plan on the cluster."""
    check_module_job(job)
    check_is_local(cluster)
    check_rank_count(plan, cluster)
    check_devices(plan, cluster)
    check_loop_plan(plan)

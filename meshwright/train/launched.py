"""Training in ranks that another launcher has started, such as torchrun, or mpirun or srun with torchrun's environment
variables. The ranks are running already, and rank 0 chooses the run folder for all."""

from typing import Any

import torch

from meshwright import errors
from meshwright.cluster.cluster import Cluster
from meshwright.errors import InputError, MeshwrightError
from meshwright.exchange import broadcast_value
from meshwright.job import Job
from meshwright.launch.heartbeat import Heartbeat
from meshwright.launch.output import redirect
from meshwright.launch.rank import run_rank
from meshwright.launch.world import World
from meshwright.plan import Axes, Plan
from meshwright.train.check import check_job
from meshwright.train.output.folder import LockedRun, RunFolder, lock_run_folder, read_result, write_job_and_plan
from meshwright.train.rank import train_rank


def train_as_launched_rank(
    job: Job, plan: Plan | None, cluster: Cluster, resume: str, recorded_steps: int = 0
) -> dict[str, Any] | None:
    """Trains as this rank of a launched run. Without a plan, every rank is a replica. `resume` and `recorded_steps` are
    those of `run.train`. Returns the result on rank 0, and None on other ranks or if the run was stopped before its
    end."""
    results: list[dict[str, Any] | None] = []

    def main(world: World, heartbeat: Heartbeat) -> None:
        results.append(_train(job, plan, cluster, resume, world, heartbeat, recorded_steps))

    run_rank(main, cluster.kind, job.train.timeout_s)
    return results[0]


def _train(
    job: Job, plan: Plan | None, cluster: Cluster, resume: str, world: World, heartbeat: Heartbeat, recorded_steps: int
) -> dict[str, Any] | None:
    plan = plan or Plan(axes=Axes(replicate=world.size))
    if plan.world_size != world.size:
        raise InputError(f"the plan ({plan.summary()}) is for {plan.world_size} ranks, torchrun started {world.size}")
    torch.set_num_threads(plan.compute.threads or max(1, cluster.cores // world.local_size))
    folder, locked_run = _agree_on_folder(job, plan, cluster, "auto" if world.attempt else resume, world)
    redirect(folder.logs, world.rank, world.attempt)
    heartbeat.move_to(folder.logs, world.rank)
    finished = train_rank(job, plan, folder, world, heartbeat, recorded_steps)
    if locked_run:
        locked_run.lock.close()
    return read_result(folder) if finished and world.rank == 0 else None


def _agree_on_folder(
    job: Job, plan: Plan, cluster: Cluster, resume: str, world: World
) -> tuple[RunFolder, LockedRun | None]:
    """Returns the run folder, which is the same on all ranks, and the locked run (None on ranks other than 0). Rank 0
    checks the job, then chooses and locks the folder. If this raises a `MeshwrightError`, every rank raises it."""
    if world.rank == 0:
        try:
            check_job(job, plan, cluster.with_device_count(world.size))
            locked_run = lock_run_folder(job, resume)
            write_job_and_plan(locked_run.folder, job, plan)
        except MeshwrightError as error:
            broadcast_value({"error": _error_class(error), "message": str(error)})
            raise
        broadcast_value({"folder": locked_run.folder.path})
        return locked_run.folder, locked_run
    outcome = broadcast_value(None)
    if "error" in outcome:
        raise getattr(errors, outcome["error"])(outcome["message"])
    return RunFolder(outcome["folder"]), None


def _error_class(error: MeshwrightError) -> str:
    """Returns the name of the class in errors.py that the error is an instance of."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)

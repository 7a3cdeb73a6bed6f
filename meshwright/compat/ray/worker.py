"""One worker of Ray Train, which trains as a rank. Ray has made the process group before, and set the variables of
torchrun."""

import os
from pathlib import Path
from typing import Any, NoReturn

import ray
import torch.distributed as dist

from meshwright.auto.launched import PlanChooser
from meshwright.cluster.detect import find_cluster
from meshwright.compat.ray.notes import RunNotes
from meshwright.compat.ray.request import WorkerRequest
from meshwright.errors import InputError, MeshwrightError, RankError
from meshwright.job import Job
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.processes.agreement import agree, versions
from meshwright.processes.environment import Environment, environment_variables
from meshwright.processes.failure import failure_from_exception
from meshwright.processes.heartbeat import Heartbeat
from meshwright.processes.rank import run_rank
from meshwright.processes.world import World
from meshwright.proof.before_training.job import CheckInWorld
from meshwright.train.launched import train_in_world


def train_worker(fields: dict[str, Any]) -> dict[str, Any] | None:
    """Trains as the rank that Ray has given this worker; `fields` are those of a `WorkerRequest`. Returns the result of
    the run on rank 0. After a restart the run is resumed, unless an earlier attempt has failed in a way that a restart
    would repeat."""
    request = WorkerRequest(**fields)
    notes = RunNotes(Path(request.notes))
    if notes.final_failure() is not None:
        return None
    attempt = broadcast_value(notes.count_start() if dist.get_rank() == 0 else None)
    with environment_variables({"TORCHELASTIC_RESTART_COUNT": str(attempt)}):
        return _train(request, notes)


def _train(request: WorkerRequest, notes: RunNotes) -> dict[str, Any] | None:
    job = Job.model_validate(request.job)
    check = CheckInWorld()
    chooser = PlanChooser(job, check.refused)
    plan, tune = (Plan.model_validate(request.plan), None) if request.plan else (chooser, chooser.tune)
    results: list[dict[str, Any] | None] = []

    def main(world: World, heartbeat: Heartbeat) -> None:
        agree(versions(), world.rank, world.size, world.store, "versions", job.train.timeout_s)
        _enter(request.folder)
        cluster = find_cluster(request.cluster)
        threads = _assigned_cores() if cluster.kind == "cpu" else None
        results.append(
            train_in_world(
                job,
                plan,
                cluster,
                request.resume,
                world,
                heartbeat,
                request.record,
                threads=threads,
                check=None if request.unproved else check,
                tune=tune,
            )
        )

    def record_and_raise(error: BaseException, env: Environment, heartbeat: Heartbeat) -> NoReturn:
        failure = failure_from_exception(error, env.rank, env.attempt, heartbeat)
        notes.write_failure(failure, heartbeat.folder)
        raise (error if isinstance(error, MeshwrightError) else RankError(failure.line)) from error

    device = "cuda" if ray.get_runtime_context().get_assigned_resources().get("GPU") else "cpu"
    run_rank(main, device, job.train.timeout_s, end=record_and_raise)
    return results[0]


def _enter(folder: str) -> None:
    """Makes the command's working folder that of this process, so that the same relative paths and modules are
    found. Ray Train has chosen one of its own."""
    try:
        os.chdir(folder)
    except OSError as error:
        raise InputError(
            f"{folder}, where the command was started, is not on the Ray node"
            f" {ray.util.get_node_ip_address()} ({error.strerror}): all nodes must see the same files"
        ) from None


def _assigned_cores() -> int:
    return max(1, int(ray.get_runtime_context().get_assigned_resources().get("CPU", 1)))

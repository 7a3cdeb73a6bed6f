"""Trains a job on a Ray cluster: connects to it, and lets Ray Train place, start and restart the workers."""

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal

from meshwright.compat.ray.notes import FailedRank, RunNotes
from meshwright.compat.ray.request import WorkerRequest
from meshwright.compat.ray.resources import WorkerResources, choose_resources, describe_resources
from meshwright.compat.versions import check_versions
from meshwright.errors import InputError, MeshwrightError, RankError, Stopped
from meshwright.files.storage import output_error
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.failure import to_error
from meshwright.processes.output import print_to_user

check_versions("meshwright.compat.ray", {"ray": "2.60.0"})  # before anything of Ray is imported

import ray  # noqa: E402
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.torch import TorchConfig, TorchTrainer  # noqa: E402

from meshwright.compat.ray.worker import train_worker  # noqa: E402

_NOTES = ".ray"  # the folder in `output` for Ray's own files and the workers' notes


def train_on_ray(
    job: Job,
    plan: Plan | Literal["auto"],
    address: str,
    workers: int | None,
    cluster: str | None,
    resume: str,
    record: int,
    unproved: bool = False,
) -> dict[str, Any] | None:
    """Trains the job on the Ray cluster at this address: `ray` for the one that this machine belongs to (or that
    RAY_ADDRESS names), or `ray://HOST:PORT`. Returns the result of the run. With `unproved`, the workers
    do not check the plan before."""
    _connect(address)
    try:
        cluster_name = cluster or job.cluster
        available = ray.cluster_resources()
        resources = choose_resources(plan, workers, cluster_name, available)
        print_to_user(f"Ray: {resources}, of a cluster with {describe_resources(available)}")
        folder = Path(job.output).absolute()
        notes = folder / _NOTES / f"{job.name}-{secrets.token_hex(4)}"
        request = WorkerRequest(
            job=job.model_copy(update={"output": str(folder)}).model_dump(mode="json"),
            plan=None if plan == "auto" else plan.model_dump(mode="json"),
            cluster=cluster_name,
            resume=resume if resume in ("auto", "never") else str(Path(resume).absolute()),
            record=record,
            folder=os.getcwd(),
            notes=str(notes),
            unproved=unproved,
        )
        settings = (request.fields(), resources, job.train.restarts, job.train.timeout_s)
        if address == "ray":
            return _run_trainer(*settings)
        # The trainer cannot be controlled through Ray's client: it runs in a task, on a machine of the cluster.
        task = ray.remote(num_cpus=0, max_retries=0)(_run_trainer)
        try:
            result: dict[str, Any] | None = ray.get(task.remote(*settings))
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, MeshwrightError):
                raise error.cause from None
            raise
        return result
    finally:
        ray.shutdown()


def _connect(address: str) -> None:
    try:
        ray.init(address="auto" if address == "ray" else address)
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"--on {address}: no Ray cluster was found ({reason}): start one with `ray start --head`, set RAY_ADDRESS"
            " to its HOST:PORT, or name its client server with --on ray://HOST:PORT"
        ) from None


def _run_trainer(
    fields: dict[str, Any], resources: WorkerResources, restarts: int, timeout_s: float
) -> dict[str, Any] | None:
    """Runs Ray Train until the run has ended, and returns its result. This process sees the folder of the run."""
    notes = RunNotes(Path(fields["notes"]))
    try:
        notes.folder.mkdir(parents=True)
    except OSError as error:
        raise output_error(error, notes.folder) from None
    trainer = TorchTrainer(
        train_worker,
        train_loop_config=fields,
        torch_config=TorchConfig(backend="nccl" if resources.gpus else "gloo", timeout_s=max(1, int(timeout_s))),
        scaling_config=ScalingConfig(
            num_workers=resources.workers,
            use_gpu=bool(resources.gpus),
            resources_per_worker={"CPU": resources.cores, **({"GPU": 1} if resources.gpus else {})},
        ),
        run_config=RunConfig(
            name=notes.folder.name,
            storage_path=str(notes.folder.parent),
            failure_config=FailureConfig(max_failures=restarts),
        ),
    )
    try:
        result: dict[str, Any] | None = trainer.fit().return_value
        failed = notes.final_failure()
        if failed is not None:
            raise _error(failed)
        return result
    except (SystemExit, KeyboardInterrupt):  # Ray Train's answer to Ctrl-C
        raise Stopped("the workers were stopped; the same command resumes the run from its last checkpoint") from None
    except ray.train.TrainingFailedError as error:
        failed = notes.final_failure() or notes.last_cause()
        if failed is not None:
            raise _error(failed) from error
        raise RankError(f"Ray Train gave up after {restarts} restarts: {' '.join(str(error).split())[:500]}") from error
    finally:
        shutil.rmtree(notes.folder, ignore_errors=True)


def _error(failed: FailedRank) -> MeshwrightError:
    error = to_error(failed.failure, failed.logs or Path())
    # A rank that failed before it had a log has written to Ray's log, which Ray has shown.
    return RankError(failed.failure.line) if isinstance(error, RankError) and failed.logs is None else error

"""`train`, the work of `meshwright train`: checks the job, locks a run folder, starts the ranks, waits for them, and
returns the result."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local
from meshwright.errors import InputError, Stopped
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.processes.environment import check_can_be_alone
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.progress import phase, say
from meshwright.train.check import check_job, check_rank_count
from meshwright.train.job_parts import JobParts
from meshwright.train.output.copies import check_copies
from meshwright.train.output.folder import (
    LockedRun,
    RunFolder,
    lock_run_folder,
    read_result,
    write_job_and_plan,
    write_page_values,
)
from meshwright.user.code import working_folder_kept

# cuBLAS is deterministic only with a fixed workspace, which must be set before a process initializes CUDA.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@contextmanager
def run_folder(job: Job, resume: str) -> Iterator[LockedRun]:
    """Within this context, the folder of a run is locked. `resume` is that of `lock_run_folder`. A new folder in which
    no rank has trained is deleted at the end."""
    output = Path(job.output)
    new_folders = [path for path in (output, *output.parents) if not os.path.lexists(path)]
    locked_run = lock_run_folder(job, resume)
    folder = locked_run.folder
    try:
        yield locked_run
    except InputError:
        if locked_run.is_new and not folder.checkpoints.exists():
            _remove(folder, new_folders)  # wrong input leaves no files
        raise
    finally:
        if locked_run.is_new and not folder.job.exists():  # stopped before the ranks started
            _remove(folder, new_folders)
        locked_run.lock.close()


def train(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    resume: str | LockedRun = "auto",
    recorded_steps: int = 0,
    predicted_step_s: float | None = None,
    reasons: Mapping[str, str] | None = None,
    parts: JobParts | None = None,
    page_values: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Trains on this machine, and returns the result, which is the content of result.json. The plan is executed as it
    is: auto/decide.py has made it, or whoever calls this.

    `resume` is that of `lock_run_folder`, or the folder of `run_folder`. `recorded_steps` is the number of steps, from
    the first one on, to record for `prove --against`. `predicted_step_s` is only copied into the result, and the
    `reasons` for the plan's fields and `page_values` into the run's folder (reasons.yaml, page.json). `parts` caches
    what planning has built of the job; its memory is released before the ranks start.
    """
    check_can_be_alone()
    parts = parts or JobParts(job)
    check_is_local(cluster)
    check_rank_count(plan, cluster)
    with phase("checking the job and the plan"), working_folder_kept():
        check_job(job, plan, cluster, parts)
    if recorded_steps and plan.gradients.servers:
        raise InputError(
            f"--record does not work with parameter servers, but plan.gradients.servers is {plan.gradients.servers}:"
            " leave out --record, or set gradients.servers to 0"
        )
    with nullcontext(resume) if isinstance(resume, LockedRun) else run_folder(job, resume) as locked_run:
        folder = locked_run.folder
        check_copies(folder, job.checkpoint.copy_to)
        if locked_run.note:
            say(locked_run.note)
        parts.release()
        write_job_and_plan(folder, job, plan, cluster, reasons)
        if page_values is not None:
            write_page_values(folder, page_values)
        prediction = "" if predicted_step_s is None else str(predicted_step_s)
        try:
            launch(
                "meshwright.train.rank",
                [str(folder.path.resolve()), cluster.kind, str(recorded_steps), prediction],
                _rank_settings(job, plan, cluster),
                folder.logs,
                DETERMINISTIC if job.train.deterministic else {},
            )
        except Stopped:
            if read_result(folder) is None:
                raise Stopped(f"{folder.path}: stopped before the end; the same command resumes it") from None
    result = read_result(folder)
    if result is None:
        raise Stopped(f"{folder.path}: the ranks were told to stop; the same command resumes it")
    return result


def _remove(folder: RunFolder, new_folders: list[Path]) -> None:
    """Deletes a run folder that no rank has trained in, and the folders above it that were created for it."""
    shutil.rmtree(folder.path, ignore_errors=True)
    with suppress(OSError):  # another run may have created a folder there
        for path in new_folders:
            path.rmdir()


def _rank_settings(job: Job, plan: Plan, cluster: Cluster) -> RankSettings:
    threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
    # With parameter servers, each worker (ranks below `workers`) can be restarted alone, and the first server, which is
    # rank `workers`, prints to the terminal. Without them, no rank can be restarted alone, and rank 0 prints.
    workers = plan.world_size if plan.gradients.servers else 0
    limits = (job.train.restarts, job.train.grace_s)
    return RankSettings(plan.processes, cluster.kind, threads, *limits, workers, workers, job.train.spare)

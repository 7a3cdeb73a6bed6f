"""`meshwright train`: checks the job, claims a run folder, starts the ranks, and brings home their result."""

import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_here
from meshwright.errors import InputError, Stopped
from meshwright.job import Job
from meshwright.launch.local.launch import Ranks, launch
from meshwright.plan import Plan
from meshwright.train.auto_precision import choose_precision
from meshwright.train.check import check
from meshwright.train.output.folder import claim, read_result, record

# cuBLAS is deterministic only with a workspace of its own, which it is told of before it starts.
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def train(
    job: Job,
    plan: Plan,
    cluster: Cluster,
    resume: str = "auto",
    predicted_step_s: float | None = None,
    recorded_steps: int = 0,
    note: str | None = None,
) -> dict[str, Any]:
    """Trains on this machine; returns the run's result as the command line's JSON has it. `note` is told to the user,
    once it is known that the job can start."""
    check_here(cluster)
    chosen = choose_precision(plan, job, cluster)
    if chosen.why:
        print(chosen.why, file=sys.stderr, flush=True)
    plan = chosen.plan
    check(job, plan, cluster)
    if recorded_steps and plan.gradients.servers:
        raise InputError(
            "--record writes down what ranks do together, which servers do for them: leave out one of both"
        )
    output = Path(job.output)
    absent = [path for path in (output, *output.parents) if not path.exists()]
    claimed = claim(job, resume)
    folder = claimed.folder
    for line in filter(None, (claimed.note, note)):
        print(line, file=sys.stderr, flush=True)
    record(folder, job, plan)
    threads = plan.compute.threads or max(1, cluster.cores // plan.world_size)
    # Workers before servers: each of them may die alone, and the first server speaks.
    workers = plan.world_size if plan.gradients.servers else 0
    ranks = Ranks(plan.processes, cluster.kind, threads, job.train.restarts, job.train.grace_s, workers, workers)
    try:
        launch(
            "meshwright.train.rank",
            [str(folder.path.resolve()), cluster.kind, str(recorded_steps)],
            ranks,
            folder.logs,
            DETERMINISTIC if job.train.deterministic else {},
        )
    except InputError:
        if claimed.fresh and not folder.checkpoints.exists():
            shutil.rmtree(folder.path)  # wrong input leaves nothing behind
            with suppress(OSError):  # somebody else trains there by now
                for path in absent:
                    path.rmdir()
        raise
    except Stopped:
        if read_result(folder) is None:
            raise Stopped(f"{folder.path}: stopped before the end; the same command goes on with it") from None
    finally:
        claimed.lock.close()
    result = read_result(folder)
    if result is None:
        raise Stopped(f"{folder.path}: the ranks were asked to stop; the same command goes on with it")
    return {**result, "run": str(folder.path), "predicted_step_s": predicted_step_s}

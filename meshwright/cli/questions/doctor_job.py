"""`meshwright doctor --job`: will a job run here, what does it need, what limits it, what would help most."""

from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from meshwright.cli.questions.plan_questions import print_answer
from meshwright.cli.ready_jobs import find_job

if TYPE_CHECKING:
    from meshwright.train.job_parts import JobParts

_LOADING_S = 1.0  # how long loading is measured


def diagnose_job_here(job: str, settings: list[str], cluster: str | None, html: Path | None, as_json: bool) -> None:
    """Prints the diagnosis of a job on a cluster. The cluster is by default that of the job."""
    from meshwright.progress import phase, say

    with phase("importing PyTorch"):
        from meshwright.auto.choose import measured_search
        from meshwright.auto.inputs import planning_inputs
        from meshwright.calibrate.model_operators import is_this_machine
        from meshwright.calibrate.probe import measure_machine
        from meshwright.cluster.detect import find_cluster
        from meshwright.compat.lightning_job import load_plain_job
        from meshwright.planner.inputs import NoPlanFits
        from meshwright.planner.questions.bottleneck import diagnose_job, refusal
        from meshwright.train.job_parts import JobParts
    begin = perf_counter()
    loaded_job = load_plain_job(find_job(job), settings, "doctor")
    parts = JobParts(loaded_job)
    machines = find_cluster(cluster or loaded_job.cluster, measure_machine)
    inputs, profiles = planning_inputs(parts, machines, top=3, notify=say)
    try:
        result, inputs = measured_search(inputs, profiles)
    except NoPlanFits as error:
        answer = refusal(str(error), inputs)
    else:
        speed = None
        if is_this_machine(inputs.cluster):
            with phase("measuring how fast samples are loaded"):
                speed = _loading_speed(parts)
        with phase("trying changes"):
            answer = diagnose_job(result, inputs, profiles, speed)
    print_answer(answer, html, loaded_job.name, round(perf_counter() - begin, 3), as_json)


def _loading_speed(parts: "JobParts") -> float | None:
    """The samples per second that one process reads, times the processes of a rank's loader; None if the job's data are
    not here or cannot be indexed."""
    from meshwright.errors import MeshwrightError

    try:
        data = parts.data[0]
        size = len(data)
    except (MeshwrightError, TypeError):
        return None
    begin, count = perf_counter(), 0
    for index in islice(range(size), 100_000):
        data[index]
        count += 1
        if perf_counter() - begin > _LOADING_S:
            break
    seconds = perf_counter() - begin
    return count / seconds * max(1, parts.job.data.workers) if count and seconds > 0 else None

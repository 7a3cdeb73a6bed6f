"""`meshwright doctor --job`: will a job run here, what does it need, what limits it, what would help most."""

from pathlib import Path
from time import perf_counter

from meshwright.cli.plan_problem import rare_collection
from meshwright.cli.questions.plan_questions import print_answer
from meshwright.cli.ready_jobs import find_job


@rare_collection()
def print_diagnosis(job: str, settings: list[str], cluster: str | None, html: Path | None, as_json: bool) -> None:
    """Prints the diagnosis of a job on a cluster. The cluster is by default that of the job."""
    from meshwright.progress import phase, say

    with phase("importing PyTorch"):
        from meshwright.auto.diagnosis import diagnose_job
        from meshwright.cli.job_file import load_plain_job
    begin = perf_counter()
    loaded_job = load_plain_job(find_job(job), settings, "doctor")
    answer = diagnose_job(loaded_job, cluster=cluster, notify=say)
    print_answer(answer, html, loaded_job.name, round(perf_counter() - begin, 3), as_json)

"""What the commands that train have in common: training on this machine or as a rank of a launcher, and printing the
result of a run."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from meshwright.cli.text import print_columns
from meshwright.errors import InputError, MeshwrightError, OutOfMemory
from meshwright.progress import say

if TYPE_CHECKING:
    from meshwright.auto.decision import Decision
    from meshwright.cluster.cluster import Cluster
    from meshwright.job import Job
    from meshwright.plan import Plan
    from meshwright.simulator.predict import Prediction
    from meshwright.train.job_parts import JobParts


def train_as_rank(
    job: "Job", plan: "Plan | Literal['auto']", cluster: str | None, resume: str, record: int, unproved: bool = False
) -> dict[str, Any] | None:
    """Trains as a rank that a launcher has started. Returns the result on rank 0 of a finished run. With `unproved`,
    the plan is not checked before."""
    from meshwright.auto.decide import plan_of_job
    from meshwright.auto.launched import PlanChooser
    from meshwright.cluster.detect import find_cluster
    from meshwright.proof.before_training.job import CheckInWorld
    from meshwright.train.job_parts import JobParts
    from meshwright.train.launched import train_as_launched_rank

    def suggest(error: OutOfMemory, used: "Plan", ranks: int) -> OutOfMemory:
        cluster = machines if machines.device_count == ranks else machines.with_device_count(ranks)
        suggested = with_smaller_plan(error, job, cluster, plan_of_job(JobParts(job), cluster, used))
        return OutOfMemory(str(suggested).replace("\n", "; "))  # a rank's failure is one line

    machines = find_cluster(cluster or job.cluster)
    check = CheckInWorld()
    chooser = PlanChooser(job, check.refused)
    choice, tune = (chooser, chooser.tune) if plan == "auto" else (plan, None)
    checked = None if unproved else check
    result = train_as_launched_rank(job, choice, machines, resume, record, suggest, checked, tune)
    if result is not None:
        _store_page_values(job, machines, Path(result["run"]))
    return result


def train_here(
    job: "Job", plan: "Plan | Literal['auto']", cluster: str | None, resume: str, record: int, unproved: bool = False
) -> dict[str, Any]:
    """Trains on the devices of this machine, on ranks that this process starts. Unless it is `unproved`, a plan that
    divides the model is first checked against one device; if it is unequal, `auto` takes the next best plan."""
    from meshwright.processes.local.fork_server import preloaded

    with preloaded("meshwright.train.rank", job.train.spare):  # ranks import while the plan is chosen
        from meshwright.auto.decide import decide
        from meshwright.cluster.detect import find_cluster
        from meshwright.proof.before_training.job import CheckHere
        from meshwright.train.job_parts import JobParts
        from meshwright.train.output.remote_run import local_run
        from meshwright.train.run import run_folder, train

        machines = find_cluster(cluster or job.cluster)
        resume = local_run(job, resume, say)
        parts = JobParts(job)
        with run_folder(job, resume) as locked_run:
            decision = decide(parts, machines, plan, resume, None if unproved else CheckHere(parts, machines))
            shown = values_of_run(machines, parts, decision.prediction, decision.plan)
            settings = (record, decision.step_s, decision.reasons, parts, shown)
            try:
                return train(job, decision.plan, machines, locked_run, *settings)
            except OutOfMemory as error:
                raise with_smaller_plan(error, job, machines, decision) from error


def _store_page_values(job: "Job", machines: "Cluster", run: Path) -> None:
    """Writes page.json of a run whose ranks another launcher has started. It has no prediction, and no cluster if the
    job's cluster does not describe the ranks."""
    from meshwright.job import load_plan
    from meshwright.train.job_parts import JobParts
    from meshwright.train.output.folder import RunFolder, write_page_values

    folder = RunFolder(run)
    with suppress(MeshwrightError):  # the run is finished, whatever happens to its page
        plan = load_plan(folder.plan)
        cluster = machines if plan.processes <= machines.device_count else None
        write_page_values(folder, values_of_run(cluster, JobParts(job), None, plan))


def profile_settings(steps: str | None) -> list[str]:
    """Returns `--profile-steps A:B` as an override of the job's field."""
    if steps is None:
        return []
    first, _, end = steps.partition(":")
    if not (first.isdecimal() and end.isdecimal()):
        raise InputError(f"--profile-steps {steps}: write the first step and the one after the last, such as 10:13")
    return [f"log.profile_steps=[{int(first)}, {int(end)}]"]


def tune_settings(seconds: str | None) -> list[str]:
    """Returns `--tune SECONDS` as an override of the job's field."""
    if seconds is None:
        return []
    try:
        number = float(seconds)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise InputError(f"--tune {seconds}: write a number of seconds, 0 to measure nothing")
    return [f"tune={number}"]


def values_of_run(
    cluster: "Cluster | None", parts: "JobParts", prediction: "Prediction | None", plan: "Plan"
) -> dict[str, Any]:
    """Returns what the run's page.json holds. The plan is not drawn on a model that cannot be built here."""
    from meshwright.report.run.page_values import page_values

    try:
        model = parts.model
    except MeshwrightError:
        model = None
    return page_values(cluster, plan, model, prediction)


def with_smaller_plan(error: OutOfMemory, job: "Job", cluster: "Cluster", chosen: "Decision") -> OutOfMemory:
    """Returns the error with what was predicted, and with the fastest plan that is predicted to need less memory."""
    from meshwright.auto.smaller_plan import plan_with_less_memory
    from meshwright.numbers.units import bytes_text
    from meshwright.train.job_parts import JobParts

    if chosen.prediction is None:
        return OutOfMemory(f"{error}\nthere is no prediction: meshwright plan shows the memory of other plans")
    memory = chosen.prediction.memory
    parts = ", ".join(f"{name} {bytes_text(size)}" for name, size in memory.breakdown.items() if size)
    text = f"predicted were {bytes_text(chosen.prediction.memory_bytes)}: {parts}"
    smaller = None
    with suppress(MeshwrightError):
        smaller = plan_with_less_memory(JobParts(job), cluster, chosen.prediction)
    if smaller is None:
        return OutOfMemory(f"{error}\n{text}\nno plan is predicted to need much less on {cluster.name}")
    needs = bytes_text(smaller.prediction.memory_bytes)
    return OutOfMemory(
        f"{error}\n{text}\nthe fastest plan that needs at least a tenth less is {smaller.plan.summary()}, with {needs}"
        f" and {smaller.prediction.step_s:.3g} s a step"
    )


def print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    rows = {}
    for name, value in result["metrics"].items():
        rows[f"test {name}"] = f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
    if result["samples_per_s"]:
        rows["samples/s"] = f"{result['samples_per_s']:,.0f}"
    if result["measured_step_s"] and result["predicted_step_s"]:
        rows["step"] = f"{result['measured_step_s']:.3g} s, predicted {result['predicted_step_s']:.3g} s"
    rows["steps"] = str(result["steps"])
    if result.get("stopped"):
        rows["stopped"] = result["stopped"]
    if result["skipped_steps"]:
        rows["skipped"] = f"{result['skipped_steps']} steps, because of NaN or Inf"
    if result["restarts"]:
        recovery_s = result.get("recovery_s")
        rows["restarts"] = str(result["restarts"]) + (f", {recovery_s:.2f} s each (median)" if recovery_s else "")
    rows["run"] = result["run"]
    print_columns(rows)  # not a rich table, which would cut a long path and read [..] in it as markup

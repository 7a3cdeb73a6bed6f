"""`mw.diagnose` and `mw.diagnose_job`, which is `meshwright doctor --job`: does a job run on a cluster, what does it
need, what limits it, and what would help most."""

from collections.abc import Callable
from itertools import islice
from time import perf_counter
from typing import Any

from torch import nn

from meshwright.auto.inputs import planning_inputs, question_inputs
from meshwright.calibrate.model_operators import is_this_machine
from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import MeshwrightError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.planner.inputs import NoPlanFits, PlanningInputs
from meshwright.planner.measured_search import measured_search
from meshwright.planner.profiles import Profiles
from meshwright.planner.questions.answer import Answer
from meshwright.planner.questions.bottleneck import Loading, answer_bottleneck, refusal
from meshwright.progress import phase
from meshwright.train.job_parts import JobParts

_LOADING_S = 1.0  # how long loading is measured
_RANKED = 3  # plans that changes are tried on


def diagnose(
    model: nn.Module,
    sample_batch: Any,
    *,
    cluster: str | Cluster,
    global_batch: int,
    loader_samples_per_s: float | None = None,
    **options: Any,
) -> Answer:
    """Returns whether the model can be trained on the cluster, what a device needs, what limits the step, and the three
    changes that would help most. `loader_samples_per_s` is how many samples are loaded in a second, if that is known.
    `options` are those of `best_plan`: `loss`, `optimizer`, `allow`, `target`, `fix`, `avoid`, `max_memory`.

    >>> import torch, meshwright as mw
    >>> model, loss = torch.nn.Linear(20, 5), torch.nn.functional.cross_entropy
    >>> batch = (torch.randn(8, 20), torch.zeros(8, dtype=torch.long))
    >>> answer = mw.diagnose(model, batch, cluster="H100", global_batch=64, loss=loss)
    >>> answer.values["runs"], answer.values["bottleneck"]
    (True, 'memory')
    """
    inputs, profiles = question_inputs(model, sample_batch, cluster, global_batch=global_batch, **options)
    return _answer(inputs, profiles, lambda plan: loader_samples_per_s)


def diagnose_job(
    job: Job, *, cluster: str | Cluster | None = None, notify: Callable[[str], None] = lambda line: None
) -> Answer:
    """Returns the same for a job, on the cluster of the job if `cluster` is None. On this machine, the operators of the
    model and the loading of its data are measured. `notify` is called with a sentence if the job's data are not here,
    and generated ones take their place.

    >>> import meshwright as mw
    >>> answer = mw.diagnose_job(mw.load_job("jobs/mnist.yaml", ["data.synthetic=true"]), cluster="2xH100")
    >>> answer.values["runs"], len(answer.values["changes"]) <= 3
    (True, True)
    """
    parts = JobParts(job)
    named = cluster or job.cluster
    machines = find_cluster(named, measure_machine) if isinstance(named, str) else named
    inputs, profiles = planning_inputs(parts, machines, top=_RANKED, notify=notify)
    loads_first = machines.kind == "cpu" and job.data.workers == 0
    is_here = is_this_machine(machines)
    return _answer(inputs, profiles, lambda plan: _loading_speed(parts, plan) if is_here else None, loads_first)


def _answer(
    inputs: PlanningInputs,
    profiles: Profiles,
    loading_speed: Callable[[Plan], float | None],
    loads_first: bool = False,  # a rank loads a batch before it computes
) -> Answer:
    try:
        result, inputs = measured_search(inputs, profiles)
    except NoPlanFits as error:
        return refusal(str(error), inputs)
    speed = loading_speed(result.ranked[0].plan)
    with phase("trying changes"):
        return answer_bottleneck(result, inputs, profiles, Loading(speed, loads_first))


def _loading_speed(parts: JobParts, plan: Plan) -> float | None:
    """The samples per second that one process reads, times the processes of a rank's loader, times the ranks that load
    different samples; None if the job's data are not here or cannot be indexed."""
    try:
        data = parts.data[0]
        size = len(data)
    except (MeshwrightError, TypeError):
        return None
    with phase("measuring how fast samples are loaded"):
        begin, count = perf_counter(), 0
        for index in islice(range(size), 100_000):
            data[index]
            count += 1
            if perf_counter() - begin > _LOADING_S:
                break
        seconds = perf_counter() - begin
    processes = max(1, parts.job.data.workers) * plan.axes.replicate * plan.axes.shard
    return count / seconds * processes if count and seconds > 0 else None

"""What `meshwright plan` plans: the job or the model, the constraints, and the cluster."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.cli.ready_jobs import find_job, is_model_name
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
    from meshwright.job import Job
    from meshwright.plan import Plan
    from meshwright.plan_fields.constraints import Constraints
    from meshwright.planner.inputs import PlanningInputs
    from meshwright.planner.profiles import Profiles
    from meshwright.train.job_parts import JobParts


_RARELY = 100


@contextmanager
def rare_collection() -> Iterator[None]:
    """Within this context, Python looks for garbage in cycles 100 times as rarely. Planning makes millions of small
    values, few of them in cycles, and each time all that PyTorch and the model consist of would be gone through."""
    first, *others = gc.get_threshold()
    gc.set_threshold(_RARELY * first, *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


@dataclass(frozen=True)
class SampleSizes:
    """The samples of a step, the tokens of a sample and the width of a picture, of a model that is named without a
    job. None: the default."""

    global_batch: int | None = None
    sequence: int | None = None
    image: int | None = None


@dataclass(frozen=True)
class PlanRequest:
    """The words of the command that say what is planned. `settings` are fields of the job, `plan_file` the only plan to
    predict."""

    word: str
    settings: list[str]
    sizes: SampleSizes
    constraints: "Constraints"
    cluster: "str | Cluster | None" = None
    plan_file: Path | None = None
    exact: bool = False
    top: int = 5

    @property
    def title(self) -> str:
        return self.word if is_model_name(self.word) else Path(self.word).stem


@dataclass(frozen=True)
class PlanProblem:
    """A request with its files loaded and its model built. `given_plan` is the only plan to predict; None if plans are
    searched for. `constraints` are those of the command line and of the job."""

    request: PlanRequest
    parts: "JobParts"
    given_plan: "Plan | None"
    constraints: "Constraints"
    inputs: "PlanningInputs"
    profiles: "Profiles"

    @property
    def job(self) -> "Job":
        return self.parts.job

    def on_cluster(self, cluster: "Cluster") -> "tuple[PlanningInputs, Profiles]":
        """The inputs of a search, and the profiles, on another cluster."""
        return self._inputs(self.parts, cluster)

    def with_sequence(self, tokens: str) -> "tuple[PlanningInputs, Profiles]":
        """The inputs of a search, and the profiles, for samples of another number of tokens."""
        from meshwright.train.job_parts import JobParts

        parts = JobParts(_job_with_sequence(self.request, self.job, int(tokens)))
        return self._inputs(parts, self.inputs.cluster)

    def _inputs(self, parts: "JobParts", cluster: "Cluster") -> "tuple[PlanningInputs, Profiles]":
        from meshwright.auto.inputs import planning_inputs

        return planning_inputs(
            parts, cluster, allow=self.inputs.allow, top=self.request.top, constraints=self.constraints
        )


def load_problem(request: PlanRequest) -> PlanProblem:
    """Loads what the request names. Raises an `InputError` for words that contradict each other."""
    from meshwright.auto.decide import dimension_plan
    from meshwright.auto.inputs import planning_inputs
    from meshwright.calibrate.probe import measure_machine
    from meshwright.cluster.detect import find_cluster
    from meshwright.job import load_plan
    from meshwright.progress import say
    from meshwright.train.job_parts import JobParts

    job = _load_job(request.word, request.settings, request.sizes)
    parts = JobParts(job)
    given_plan = load_plan(request.plan_file) if request.plan_file else None
    if given_plan is not None and request.constraints:
        raise InputError(
            f"--plan {request.plan_file} is complete, so there is nothing to search for with"
            f" {request.constraints.describe()}: leave out one"
        )
    constraints = job.constraints.with_others(request.constraints)
    if given_plan is None and job.plan != "auto":
        say(f"the job's own plan ({job.plan.summary()}) is left out: --plan FILE predicts a plan")
    named = request.cluster or job.cluster
    machines = find_cluster(named, measure_machine) if isinstance(named, str) else named
    if given_plan is None and job.data.partition == "dimension":  # this partition determines the plan
        if constraints:
            raise InputError(
                f"data.partition is dimension, which determines the plan: leave out {constraints.describe()}"
            )
        given_plan = dimension_plan(parts, machines)
    inputs, profiles = planning_inputs(
        parts,
        machines,
        allow="same" if request.exact else None,
        top=request.top,
        notify=say,
        constraints=constraints,
    )
    return PlanProblem(request, parts, given_plan, constraints, inputs, profiles)


def _job_with_sequence(request: PlanRequest, job: "Job", tokens: int) -> "Job":
    """Returns the job with samples of another number of tokens: of a model, or of a job whose data have `sequence`."""
    from meshwright.user.call import takes

    sizes = request.sizes
    if is_model_name(request.word):
        return _load_job(request.word, request.settings, SampleSizes(sizes.global_batch, tokens, sizes.image))
    sections = {"data.train": job.data.train, "data.eval": job.data.eval}
    names = [name for name, call in sections.items() if call is not None and "sequence" in call.model_dump()]
    if "data.train" not in names:
        raise InputError(
            f"sweep sequence={tokens}: the job's data.train has no keyword 'sequence' that could be varied: use a"
            " model such as hf:llama, or run plan once for each job"
        )
    names += ["model"] if takes(job.model, "sequence") else []
    lengths = [f"{name}.sequence={tokens}" for name in names]
    return _load_job(request.word, [*request.settings, *lengths], SampleSizes(image=sizes.image))


def _load_job(word: str, settings: list[str], sizes: SampleSizes) -> "Job":
    """Returns the job that the user names, or the job that `meshwright init` would write for the model."""
    from meshwright.cli.job_file import load_plain_job
    from meshwright.job import load_job

    if is_model_name(word):
        from meshwright.zoo.job_text import job_text

        return load_job(word, settings, job_text(word, sizes.global_batch, sizes.sequence, sizes.image))
    for name, value, job_field in (
        ("--global-batch", sizes.global_batch, "train.global_batch=N"),
        ("--sequence", sizes.sequence, "A.B=N with the job's own field"),
        ("--image", sizes.image, "A.B=N with the job's own field"),
    ):
        if value is not None:
            raise InputError(
                f"{name} {value}: this option is for models such as hf:llama; for a job, use --set {job_field}"
            )
    return load_plain_job(find_job(word), settings, "plan")

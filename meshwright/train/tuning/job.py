"""Tunes the plan of a job whose ranks `meshwright train` starts on this machine: times variants of its `compute` fields
before the ranks start, in processes of their own (processes.py)."""

from collections.abc import Callable, Sequence

from meshwright.cluster.cluster import Cluster
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.job_parts import JobParts
from meshwright.train.tuning.kept import KeptChoice, choice_file, load_choice, save_choice
from meshwright.train.tuning.processes import StepMeasurer
from meshwright.train.tuning.steps import plan_of_rank
from meshwright.train.tuning.variants import (
    Variant,
    default_budget_s,
    expected_compile_s,
    fastest_variant,
    kept_plan,
)

_LEAST_S = 5.0  # starting a measuring process takes about as long


def tune_job(
    plan: Plan,
    make_variants: Callable[[], Sequence[Variant]],
    parts: JobParts,
    cluster: Cluster,
    step_s: float | None,
    notify: Callable[[str], None],
) -> tuple[Plan, str]:
    """Returns the plan with the `compute` fields of the fastest of its variants, and a line that says what was measured
    for it; an empty one if nothing was. `step_s` are the predicted seconds of a step; None if they are not known.
    `notify` is called with this line, and with one for each variant that cannot be taken. Nothing is measured if the
    job says so (`tune`, `train.deterministic`), or if its plan divides the model."""
    if not may_tune(parts.job, plan):
        return plan, ""
    budget_s = budget_of_job(parts, step_s)
    is_long = budget_s >= _LEAST_S
    if not (is_long or plan.compute.compile != "none") or not (variants := make_variants()):
        return plan, ""
    file = choice_file(plan, parts.model, parts.sample, others_of_job(parts.job, cluster))
    known = load_choice(file, budget_s)
    if known is not None and (kept := kept_plan(plan, variants, known.compute)) is not None:
        line = f"{known.line} (in an earlier run)"
        notify(line)
        return kept, line
    with StepMeasurer(parts.job, plan, cluster) as measurer:
        compile_s = expected_compile_s(parts.model)
        choice = fastest_variant(plan, variants, measurer.measure, budget_s if is_long else 0.0, compile_s, notify)
    if choice.line:
        notify(choice.line)
    if choice.is_measured:
        save_choice(file, KeptChoice(choice.plan.compute, choice.line, None if choice.is_complete else budget_s))
    return choice.plan, choice.line


def may_tune(job: Job, plan: Plan) -> bool:
    """Whether steps of this job may be timed under variants of this plan."""
    return bool(job.tune) and not job.train.deterministic and plan_of_rank(plan) is not None


def budget_of_job(parts: JobParts, step_s: float | None) -> float:
    """The seconds that tuning may take. `step_s` are the predicted seconds of a step; None if they are not known."""
    tune = parts.job.tune
    return default_budget_s(_steps_of(parts), step_s) if tune is True else float(tune)


def _steps_of(parts: JobParts) -> int | None:
    """The number of steps of a run; None if the job counts epochs of a stream."""
    train, data = parts.job.train, parts.data[0]
    if train.epochs is None or not hasattr(data, "__len__"):
        return train.steps
    in_epochs = train.epochs * -(-len(data) // train.global_batch)
    return min(in_epochs, train.steps or in_epochs)


def others_of_job(job: Job, cluster: Cluster) -> dict[str, object]:
    """What else a choice depends on: the job's calls, its batch, and the device."""
    dumped = job.model_dump(mode="json")
    calls = {name: dumped[name] for name in ("model", "loss", "optimizer", "data")}
    return {**calls, "batch": job.train.global_batch, "device": [cluster.nodes[0].device.name, cluster.cores]}

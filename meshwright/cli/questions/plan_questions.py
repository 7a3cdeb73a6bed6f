"""Questions that options of `meshwright plan` ask: reads them, has them answered, and prints and draws the answer."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.cli.text import console
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.planner.inputs import PlanningInputs
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.questions.answer import Answer

_GOALS = ("time", "cost", "devices")


@dataclass(frozen=True)
class PlanQuestion:
    """The options of one question. At most one of `batch`, `sweep`, `goal` and `plans` is not None."""

    batch: str | None = None
    sweep: str | None = None
    what_if: tuple[str, ...] = ()
    goal: str | None = None
    deadline: str | None = None
    budget: float | None = None
    epochs: int | None = None
    clusters: str | None = None
    price: float | None = None
    plans: tuple[Path, Path] | None = None

    def is_asked(self) -> bool:
        """Whether there is a question. Raises an `InputError` if options do not fit together."""
        asked = {"--batch": self.batch, "--sweep": self.sweep, "--for": self.goal, "--explain": self.plans}
        names = [name for name, value in asked.items() if value is not None]
        if len(names) > 1:
            raise InputError(f"{names[0]} and {names[1]} are two questions: ask one after the other")
        needed = {
            "--what-if": ("--sweep", self.what_if or None),
            "--price": ("--sweep", self.price),
            "--deadline": ("--for", self.deadline),
            "--budget": ("--for", self.budget),
            "--epochs": ("--for", self.epochs),
            "--clusters": ("--for", self.clusters),
        }
        for name, (other, value) in needed.items():
            if value is not None and other not in names:
                raise InputError(f"{name} belongs to {other}: add {other}, or leave out {name}")
        if self.batch is not None and self.batch != "max":
            raise InputError(
                f"--batch {self.batch}: write --batch max for the largest that fits; a batch is set with --set"
                " train.global_batch=N, or with --global-batch N for a model"
            )
        if self.goal is not None and self.goal not in _GOALS:
            raise InputError(f"--for {self.goal}: write time, cost or devices")
        return bool(names)


def ask(
    question: PlanQuestion,
    job: "Job",
    inputs: "PlanningInputs",
    profiles: "Profiles",
    inputs_with_sequence: "Callable[[str], tuple[PlanningInputs, Profiles]]",
) -> "Answer":
    """Returns the answer. `inputs_with_sequence` makes the inputs for another number of tokens."""
    from meshwright.calibrate.model_operators import is_this_machine
    from meshwright.planner.inputs import with_measured_operators

    if is_this_machine(inputs.cluster):
        inputs = with_measured_operators(inputs, profiles)
    if question.sweep is not None:
        return _sweep(question, inputs, profiles, inputs_with_sequence)
    if question.goal is not None:
        return _best_cluster(question, job, inputs, profiles)
    if question.plans is not None:
        from meshwright.job import load_plan
        from meshwright.planner.questions.differences import explain_difference

        first, second = (load_plan(file) for file in question.plans)
        return explain_difference(first, second, inputs, profiles)
    from meshwright.planner.offload import search_with_offload
    from meshwright.planner.questions.largest_batch import answer_largest_batch

    return answer_largest_batch(search_with_offload(inputs, profiles), inputs, profiles)


def _sweep(
    question: PlanQuestion,
    inputs: "PlanningInputs",
    profiles: "Profiles",
    inputs_with_sequence: "Callable[[str], tuple[PlanningInputs, Profiles]]",
) -> "Answer":
    from meshwright.planner.questions.answer import with_cluster_price
    from meshwright.planner.questions.sweep import sweep
    from meshwright.planner.questions.variations import changed, read_sweep

    assert question.sweep is not None
    name, values = read_sweep(question.sweep)
    for change in question.what_if:
        changed(inputs.cluster, change)  # a mistake is named before the first search
    inputs = with_cluster_price(inputs, question.price)
    inputs_of = inputs_with_sequence if name == "sequence" else None
    return sweep(name, values, inputs, profiles, question.what_if, inputs_of)


def _best_cluster(question: PlanQuestion, job: "Job", inputs: "PlanningInputs", profiles: "Profiles") -> "Answer":
    from meshwright.planner.questions.goals import Goal, Limits, best_cluster, read_clusters, read_duration

    if question.clusters is None:
        raise InputError(
            "--for needs clusters to choose from: --clusters 8xH100=24,2x8xH100=48 (with prices of an hour)"
        )
    deadline = read_duration(question.deadline, "--deadline") if question.deadline is not None else None
    clusters = read_clusters(question.clusters)
    steps = _steps(question.epochs, job, inputs)
    limits = Limits(deadline, question.budget)
    return best_cluster(cast(Goal, question.goal), clusters, steps, limits, inputs, profiles)


def _steps(epochs: int | None, job: "Job", inputs: "PlanningInputs") -> int:
    """The number of steps of the run."""
    wanted = epochs or job.train.epochs
    in_epochs = None
    if wanted is not None and inputs.epoch_samples is not None:
        in_epochs = wanted * -(-inputs.epoch_samples // inputs.global_batch)
    if epochs is not None and in_epochs is None:
        raise InputError(
            f"--epochs {epochs}: the length of an epoch is not known, because the job's data are not here: set"
            " data.root, or set train.steps instead"
        )
    options = [steps for steps in (in_epochs, job.train.steps if epochs is None else None) if steps is not None]
    if not options:
        raise InputError(
            "--for needs the length of the run: the data are not here, so set train.steps with --set train.steps=N"
        )
    return min(options)


def print_answer(answer: "Answer", html: Path | None, title: str, seconds: float, as_json: bool) -> None:
    """Prints an answer as a table or as JSON, and writes its page."""
    from meshwright.planner.questions.answer import show_answer

    values: dict[str, Any] = {**answer.to_dict(), "title": title, "seconds": seconds}
    if html is not None:
        from meshwright.report.page import write_page
        from meshwright.report.questions.page import question_page

        write_page(question_page(values), html)
    if as_json:
        print(json.dumps(values), flush=True)
    else:
        show_answer(answer, console())

"""Questions that options of `meshwright plan` ask: reads them, has them answered, and prints and draws the answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.cli.plan_problem import PlanProblem
from meshwright.cli.text import console
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
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
        if self.goal is not None and self.clusters is None:
            raise InputError(
                "--for needs clusters to choose from: --clusters 8xH100=24,2x8xH100=48 (with prices of an hour)"
            )
        for name, number in (("--price", self.price), ("--budget", self.budget)):
            if number is not None and not 0 < number < 1e15:
                raise InputError(f"{name} {number}: write a number above 0")
        return bool(names)

    def check_values(self, cluster: str | None) -> None:
        """Raises an `InputError` for a sweep, clusters or a time that cannot be read. `cluster` is that of the
        command."""
        from meshwright.planner.questions.variations import read_sweep

        if self.sweep is not None and read_sweep(self.sweep)[0] == "gpu" and self.price is not None:
            raise InputError(
                f"--price {self.price:g} is that of one kind of device, and --sweep {self.sweep} has several: compare"
                " them with --for cost and --clusters"
            )
        if self.goal is not None:
            if cluster is not None:
                raise InputError(f"--cluster {cluster}: --for chooses among --clusters: leave out --cluster")
            self.read_clusters()
            self.deadline_s()

    def read_clusters(self) -> "list[Cluster]":
        """The clusters that `--for` chooses from."""
        from meshwright.planner.questions.goals import read_clusters

        assert self.clusters is not None
        return read_clusters(self.clusters)

    def deadline_s(self) -> float | None:
        from meshwright.planner.questions.goals import read_duration

        return None if self.deadline is None else read_duration(self.deadline, "--deadline")


def ask(question: PlanQuestion, problem: PlanProblem) -> "Answer":
    """Returns the answer."""
    inputs, profiles = problem.inputs, problem.profiles
    if question.sweep is not None:
        return _sweep(question, problem)
    if question.goal is not None:
        return _best_cluster(question, problem)
    if question.plans is not None:
        from meshwright.job import load_plan
        from meshwright.planner.measured_search import with_measured_operators
        from meshwright.planner.questions.differences import explain_difference

        first, second = (load_plan(file) for file in question.plans)
        return explain_difference(first, second, with_measured_operators(inputs, profiles), profiles)
    from meshwright.planner.measured_search import measured_search
    from meshwright.planner.questions.largest_batch import answer_largest_batch

    return answer_largest_batch(*measured_search(inputs, profiles), profiles)


def _sweep(question: PlanQuestion, problem: PlanProblem) -> "Answer":
    from meshwright.planner.questions.answer import with_cluster_price
    from meshwright.planner.questions.sweep import sweep
    from meshwright.planner.questions.variations import read_sweep

    assert question.sweep is not None
    name, values = read_sweep(question.sweep)
    inputs = with_cluster_price(problem.inputs, question.price)

    def with_sequence(tokens: str) -> "tuple[PlanningInputs, Profiles]":
        other, profiles = problem.with_sequence(tokens)
        return with_cluster_price(other, question.price), profiles

    inputs_of = with_sequence if name == "sequence" else None
    return sweep(name, values, inputs, problem.profiles, question.what_if, inputs_of, problem.on_cluster)


def _best_cluster(question: PlanQuestion, problem: PlanProblem) -> "Answer":
    from meshwright.planner.questions.goals import Goal, Limits, best_cluster

    limits = Limits(question.deadline_s(), question.budget)
    return best_cluster(
        cast(Goal, question.goal),
        question.read_clusters(),
        _steps(question.epochs, problem.job, problem.inputs),
        limits,
        problem.inputs,
        problem.profiles,
        problem.on_cluster,
    )


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

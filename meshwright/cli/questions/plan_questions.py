"""The questions of `meshwright ask`: reads them, has them answered, and prints and draws the answer."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from meshwright.cli.plan_problem import PlanProblem
from meshwright.cli.text import console
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.cluster.cluster import Cluster
    from meshwright.planner.inputs import PlanningInputs
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.questions.answer import Answer

_GOALS = ("time", "cost", "devices")


@dataclass(frozen=True)
class PlanQuestion:
    """The words of one question. Exactly one of `batch`, `sweep`, `goal`, `plans` and `changes` is set.

    what_if   with a sweep: also the same with these changes of the cluster
    changes   the question is what these changes of the cluster would do to one plan
    tokens, samples, epochs   how long the run of a goal is; None: as long as the job's
    price     the price of a device and hour
    """

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
    tokens: str | None = None
    samples: str | None = None
    changes: tuple[str, ...] = ()

    def check(self, cluster: str | None) -> None:
        """Raises an `InputError` for words that cannot be read. `cluster` is that of the command."""
        from meshwright.planner.questions.variations import read_sweep

        for name, number in (("--price", self.price), ("--budget", self.budget)):
            if number is not None and not 0 < number < 1e15:
                raise InputError(f"{name} {number}: write a number above 0")
        if self.sweep is not None and read_sweep(self.sweep)[0] == "gpu" and self.price is not None:
            raise InputError(
                f"--price {self.price:g} is that of one kind of device, and sweep {self.sweep} has several: compare"
                " them with meshwright ask for JOB cost --clusters"
            )
        if self.goal is not None:
            self._check_goal(cluster)

    def _check_goal(self, cluster: str | None) -> None:
        if self.goal not in _GOALS:
            raise InputError(f"the goal is '{self.goal}': write time, cost or devices")
        lengths = {"--epochs": self.epochs, "--tokens": self.tokens, "--samples": self.samples}
        given = [f"{name} {value}" for name, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise InputError(f"{given[0]} and {given[1]} both say how long the run is: leave out one")
        self.length()
        if self.clusters is None and cluster is None:
            raise InputError(
                "there is no cluster to choose: write --cluster 8xH100, or several with prices of an hour:"
                " --clusters 8xH100=24,2x8xH100=48"
            )
        if self.clusters is not None:
            if cluster is not None:
                raise InputError(f"--cluster {cluster}: this question chooses among --clusters: leave out one of them")
            if self.price is not None:
                raise InputError(f"--price {self.price:g} is for --cluster: --clusters has prices, 8xH100=24")
        self.read_clusters(cluster)
        self.deadline_s()

    def length(self) -> tuple[str, int] | None:
        """What `--tokens` or `--samples` say: which of the two, and how many. None without them."""
        from meshwright.plan_fields.quantities import read_count

        for name, text in (("tokens", self.tokens), ("samples", self.samples)):
            if text is not None:
                return name, read_count(text, f"--{name}")
        return None

    def read_clusters(self, cluster: str | None = None) -> "list[Cluster]":
        """The clusters that a goal chooses from. `cluster` is the only one if there is no list."""
        from meshwright.calibrate.probe import measure_machine
        from meshwright.cluster.detect import find_cluster
        from meshwright.planner.questions.goals import read_clusters

        if self.clusters is not None:
            return read_clusters(self.clusters)
        assert cluster is not None
        found = find_cluster(cluster, measure_machine)
        if self.price is None:
            return [found]
        return [found.model_copy(update={"price_per_hour": self.price * found.device_count})]

    def deadline_s(self) -> float | None:
        from meshwright.planner.questions.goals import read_duration

        return None if self.deadline is None else read_duration(self.deadline, "--deadline")


def answer_question(question: PlanQuestion, problem: PlanProblem) -> "Answer":
    """Returns the answer."""
    inputs, profiles = problem.inputs, problem.profiles
    if question.sweep is not None:
        return _sweep(question, problem)
    if question.goal is not None:
        return _best_cluster(question, problem)
    if question.changes:
        from meshwright.planner.questions.what_if import what_if

        return what_if(question.changes, inputs, profiles)
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
    from meshwright.numbers.units import words_text
    from meshwright.planner.questions.goals import Goal, Limits, best_cluster

    limits, length = Limits(question.deadline_s(), question.budget), question.length()
    return best_cluster(
        cast(Goal, question.goal),
        question.read_clusters() if question.clusters is not None else [problem.inputs.cluster],
        _steps(question, problem),
        limits,
        problem.inputs,
        problem.profiles,
        problem.on_cluster,
        f"{words_text(length[1])} {length[0]}" if length is not None else None,
    )


def _steps(question: PlanQuestion, problem: PlanProblem) -> int:
    """The number of steps of the run."""
    from meshwright.planner.explanation.headline import tokens_per_sample

    inputs, job, epochs = problem.inputs, problem.job, question.epochs
    length = question.length()
    if length is not None:
        name, number = length
        profile = problem.profiles.get(inputs.precisions_to_try()[0], "none")
        per_sample = tokens_per_sample(profile) if name == "tokens" else 1
        if not per_sample:
            raise InputError(
                f"--tokens {question.tokens}: the samples of this model have no tokens: write --samples N or --epochs N"
            )
        return -(-number // (per_sample * inputs.global_batch))
    wanted = epochs or job.train.epochs
    in_epochs = None
    if wanted is not None and inputs.epoch_samples is not None:
        in_epochs = wanted * -(-inputs.epoch_samples // inputs.global_batch)
    if epochs is not None and in_epochs is None:
        raise InputError(
            f"--epochs {epochs}: the length of an epoch is not known, because the job's data are not here: set"
            " data.root, or write --tokens 1B or --samples 1M"
        )
    options = [steps for steps in (in_epochs, job.train.steps if epochs is None else None) if steps is not None]
    if not options:
        raise InputError(
            "the length of the run is not known, because the job's data are not here: write --tokens 1B, --samples 1M"
            " or --set train.steps=N"
        )
    return min(options)


def print_answer(answer: "Answer", html: Path | None, title: str, seconds: float, as_json: bool) -> None:
    """Prints an answer as a table or as JSON, and writes its page."""
    from meshwright.planner.questions.answer import show_answer

    values: dict[str, Any] = {**answer.to_dict(), "title": title, "seconds": seconds}
    if html is not None:
        from meshwright.report.page import write_page
        from meshwright.report.question_page import question_page

        write_page(question_page(values), html)
    if as_json:
        print(json.dumps(values), flush=True)
    else:
        show_answer(answer, console())

"""`meshwright plan`: the fastest plans for a job, or for a model that is named without a job."""

import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer

from meshwright.cli.options import (
    AsJson,
    ClusterName,
    GlobalBatch,
    ImageSize,
    SequenceLength,
    Settings,
    check_output,
    path_option,
)
from meshwright.cli.plan_problem import PlanProblem, PlanRequest, SampleSizes, load_problem, rare_collection
from meshwright.cli.questions.options import (
    Avoid,
    Batch,
    Budget,
    Clusters,
    Deadline,
    Epochs,
    ExplainPlans,
    Fix,
    For,
    MaxMemory,
    Precision,
    Price,
    Sweep,
    WhatIf,
    plan_settings,
    read_constraints,
)
from meshwright.cli.questions.plan_questions import PlanQuestion, ask, print_answer
from meshwright.cli.ready_jobs import complete_job_or_model
from meshwright.cli.text import console
from meshwright.errors import InputError

MOST_SHOWN_PLANS = 100_000


@dataclass(frozen=True)
class _Output:
    """Where the result goes: into files, and to stdout as JSON, or as a table with all fields of the plan (`full`)."""

    plan: Path | None
    html: Path | None
    details: Path | None
    full: bool
    as_json: bool


def plan(
    job: Annotated[
        str,
        typer.Argument(
            metavar="JOB|MODEL",
            help="A job, as for train; or a model: hf:FOLDER (or its config.json, or a model type such as hf:llama),"
            " timm:NAME or torchvision:NAME.",
            autocompletion=complete_job_or_model,
        ),
    ],
    cluster: ClusterName = None,
    plan: Annotated[Path | None, path_option("--plan", "FILE", "Predict this plan only.")] = None,
    output: Annotated[
        Path | None, path_option("--output", "FILE", "Write the best plan to this file, for --plan; replaces the file.")
    ] = None,
    html: Annotated[
        Path | None, path_option("--html", "FILE", "Write a page with charts and tables to this file.")
    ] = None,
    details: Annotated[
        Path | None,
        path_option("--details", "FILE", "Write what the page shows as JSON, from which report makes the page later."),
    ] = None,
    top: Annotated[int, typer.Option(min=1, max=MOST_SHOWN_PLANS, help="How many plans to show.")] = 5,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            help="Only plans that compute the same values as one device, up to the order of sums, as with allow: same.",
        ),
    ] = False,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    batch: Batch = None,
    sweep: Sweep = None,
    what_if: WhatIf = None,
    goal: For = None,
    deadline: Deadline = None,
    budget: Budget = None,
    epochs: Epochs = None,
    clusters: Clusters = None,
    price: Price = None,
    explain: ExplainPlans = None,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    full: Annotated[
        bool,
        typer.Option("--full", help="Print all fields of the best plan, also those with default values."),
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a job on any cluster. The cluster need not exist: steps are predicted, not run. Prints
    ranked plans, and why others were rejected. For a model, neither a job nor weights nor a network are needed."""
    from meshwright.progress import phase

    for file, option in ((output, "--output"), (html, "--html"), (details, "--details")):
        if file:
            check_output(file, option)
    question = PlanQuestion(
        batch, sweep, tuple(what_if or ()), goal, deadline, budget, epochs, clusters, price, explain
    )
    for_one_plan = {"--plan": plan, "--output": output, "--details": details, "--full": full}
    given = next((name for name, value in for_one_plan.items() if value), None)
    if (is_question := question.is_asked()) and given:
        raise InputError(f"{given} is for one plan: leave it out of a question; --html draws the answer")
    job_settings, fixed_settings = plan_settings(settings or [])
    constraints = read_constraints([*fixed_settings, *(fix or [])], avoid or [], max_memory, precision)
    with rare_collection():
        with phase("importing PyTorch"):
            import meshwright.auto.choose  # noqa: F401
        begin = perf_counter()
        question.check_values(cluster)
        machines = question.read_clusters()[0] if question.goal else cluster
        sizes = SampleSizes(global_batch, sequence, image)
        problem = load_problem(PlanRequest(job, job_settings, sizes, constraints, machines, plan, exact, top))
        if is_question:
            with phase("answering the question"):
                answer = ask(question, problem)
            print_answer(answer, html, problem.request.title, round(perf_counter() - begin, 3), as_json)
        else:
            _find_plans(problem, begin, _Output(output, html, details, full, as_json))


def _find_plans(problem: PlanProblem, begin: float, output: _Output) -> None:
    """Searches for plans, or predicts the given one, and writes and prints the result."""
    from meshwright.auto.choose import free_best
    from meshwright.planner.explanation.report import predict_given_plan, report_search, show
    from meshwright.planner.measured_search import measured_search, with_measured_operators
    from meshwright.progress import phase

    inputs, profiles, result = problem.inputs, problem.profiles, None
    if problem.given_plan:
        with phase("predicting the plan"):
            report = predict_given_plan(problem.given_plan, with_measured_operators(inputs, profiles), profiles)
    else:
        result, inputs = measured_search(inputs, profiles)
        with phase("comparing with other precisions"):
            report = report_search(result, inputs, profiles, free_best(inputs, profiles))
    if output.plan:
        report.ranked[0][0].save(output.plan)
    seconds = round(perf_counter() - begin, 3)
    if output.html or output.details:
        from meshwright.report.plans.write import write_plan_files

        write_plan_files(
            *(report, result, inputs, profiles),
            title=problem.request.title,
            seconds=seconds,
            html=output.html,
            details=output.details,
        )
    if output.as_json:
        print(json.dumps({**report.to_dict(), "seconds": seconds}), flush=True)
    else:
        show(report, inputs, console(), seconds, output.full)

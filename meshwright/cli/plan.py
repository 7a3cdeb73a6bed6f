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
    check_page,
    path_option,
)
from meshwright.cli.plan_problem import PlanProblem, PlanRequest, SampleSizes, load_problem, rare_collection
from meshwright.cli.questions import options as moved
from meshwright.cli.questions.ask import Asked, print_answer_to
from meshwright.cli.questions.moved import check_moved, say_where
from meshwright.cli.questions.options import Avoid, Fix, MaxMemory, Precision, plan_settings, read_constraints
from meshwright.cli.questions.plan_questions import PlanQuestion
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
    batch: moved.MovedBatch = None,
    sweep: moved.MovedSweep = None,
    what_if: moved.MovedWhatIf = None,
    goal: moved.MovedFor = None,
    deadline: moved.MovedDeadline = None,
    budget: moved.MovedBudget = None,
    epochs: moved.MovedEpochs = None,
    tokens: moved.MovedTokens = None,
    samples: moved.MovedSamples = None,
    clusters: moved.MovedClusters = None,
    price: moved.MovedPrice = None,
    explain: moved.MovedExplain = None,
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
    ranked plans, and why others were rejected. For a model, neither a job nor weights nor a network are needed.
    `meshwright ask` answers questions about plans."""
    from meshwright.progress import phase

    for file, option in ((output, "--output"), (details, "--details")):
        if file:
            check_output(file, option)
    if html:
        check_page(html)
    question = PlanQuestion(
        *(batch, sweep, tuple(what_if or ()), goal, deadline, budget, epochs, clusters, price, explain, tokens, samples)
    )
    sizes, constraints = SampleSizes(global_batch, sequence, image), (fix, avoid, max_memory, precision)
    if check_moved(question):
        for_one_plan = {"--plan": plan, "--output": output, "--details": details, "--full": full}
        if given := next((name for name, value in for_one_plan.items() if value), None):
            raise InputError(f"{given} is for one plan: leave it out of a question; --html draws the answer")
        print_answer_to(question, Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json))
        say_where(question, job)
        return
    job_settings, fixed = plan_settings(settings or [])
    kept = read_constraints([*fixed, *(fix or [])], avoid or [], max_memory, precision)
    with rare_collection():
        with phase("importing PyTorch"):
            import meshwright.auto.choose  # noqa: F401
        begin = perf_counter()
        problem = load_problem(PlanRequest(job, job_settings, sizes, kept, cluster, plan, exact, top))
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

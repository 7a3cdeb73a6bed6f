"""`meshwright plan`: the fastest plans for a job, or for a model that is named without a job."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from meshwright.cli.ready_jobs import complete_job_or_model, find_job, is_model_name
from meshwright.cli.text import console
from meshwright.errors import InputError

if TYPE_CHECKING:
    from meshwright.job import Job
    from meshwright.planner.inputs import PlanningInputs
    from meshwright.planner.profiles import Profiles

MOST_SHOWN_PLANS = 100_000


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
    from time import perf_counter

    from meshwright.job import load_plan
    from meshwright.progress import phase, say

    with phase("importing PyTorch"):
        from meshwright.auto.choose import dimension_plan, free_best, measured_search
        from meshwright.auto.inputs import planning_inputs
        from meshwright.calibrate.probe import measure_machine
        from meshwright.cluster.detect import find_cluster
        from meshwright.planner.explanation.report import predict_given_plan, report_search, show
        from meshwright.planner.inputs import with_measured_operators
        from meshwright.train.job_parts import JobParts

    for file, option in ((output, "--output"), (html, "--html"), (details, "--details")):
        if file:
            check_output(file, option)
    begin = perf_counter()
    question = PlanQuestion(
        batch, sweep, tuple(what_if or ()), goal, deadline, budget, epochs, clusters, price, explain
    )
    is_question = question.is_asked()
    if is_question and (plan or output or details):
        given = "--plan" if plan else "--output" if output else "--details"
        raise InputError(f"{given} is for one plan: leave it out of a question; --html draws the answer")
    job_settings, fixed_settings = plan_settings(settings or [])
    loaded_job = _load(job, job_settings, global_batch, sequence, image)
    constraints = read_constraints([*fixed_settings, *(fix or [])], avoid or [], max_memory, precision)
    parts = JobParts(loaded_job)
    given_plan = load_plan(plan) if plan else None
    if given_plan is not None and constraints:
        raise InputError(
            f"--plan {plan} is complete, so there is nothing to search for with {constraints.describe()}: leave out one"
        )
    constraints = loaded_job.constraints.with_others(constraints)
    if given_plan is None and loaded_job.plan != "auto":
        say(f"the job's own plan ({loaded_job.plan.summary()}) is left out: --plan FILE predicts a plan")
    machines = find_cluster(cluster or loaded_job.cluster, measure_machine)
    if given_plan is None and loaded_job.data.partition == "dimension":  # this partition determines the plan
        if constraints:
            raise InputError(
                f"data.partition is dimension, which determines the plan: leave out {constraints.describe()}"
            )
        given_plan = dimension_plan(parts, machines)
    inputs, profiles = planning_inputs(
        parts, machines, allow="same" if exact else None, top=top, notify=say, constraints=constraints
    )
    if is_question:

        def with_sequence(tokens: str) -> "tuple[PlanningInputs, Profiles]":
            other = _load_with_sequence(job, job_settings, loaded_job, int(tokens), global_batch, image)
            return planning_inputs(JobParts(other), machines, allow=inputs.allow, top=top, constraints=constraints)

        with phase("answering the question"):
            answer = ask(question, loaded_job, inputs, profiles, with_sequence)
        title = job if is_model_name(job) else Path(job).stem
        print_answer(answer, html, title, round(perf_counter() - begin, 3), as_json)
        return
    result = None
    if given_plan:
        with phase("predicting the plan"):
            report = predict_given_plan(given_plan, with_measured_operators(inputs, profiles), profiles)
    else:
        result, inputs = measured_search(inputs, profiles)
        with phase("comparing with other precisions"):
            report = report_search(result, inputs, profiles, free_best(inputs, profiles))
    if output:
        report.ranked[0][0].save(output)
    seconds = round(perf_counter() - begin, 3)
    if html or details:
        from meshwright.report.plans.write import write_plan_files

        title = job if is_model_name(job) else Path(job).stem
        write_plan_files(report, result, inputs, profiles, title=title, seconds=seconds, html=html, details=details)
    if as_json:
        print(json.dumps({**report.to_dict(), "seconds": seconds}), flush=True)
    else:
        show(report, inputs, console(), seconds, full)


def _load_with_sequence(
    word: str, settings: list[str], job: "Job", tokens: int, global_batch: int | None, image: int | None
) -> "Job":
    """Returns the job with samples of another number of tokens: of a model, or of a job whose data have `sequence`."""
    if is_model_name(word):
        return _load(word, settings, global_batch, tokens, image)
    sections = {"data.train": job.data.train, "data.eval": job.data.eval}
    names = [name for name, call in sections.items() if call is not None and "sequence" in call.model_dump()]
    if "data.train" not in names:
        raise InputError(
            f"--sweep sequence={tokens}: the job's data.train has no keyword 'sequence' that could be varied: use a"
            " model such as hf:llama, or run plan once for each job"
        )
    own = [f"{name}.sequence={tokens}" for name in names]
    return _load(word, [*settings, *own, f"model.sequence={tokens}"], None, None, image)


def _load(word: str, settings: list[str], global_batch: int | None, sequence: int | None, image: int | None) -> "Job":
    """Returns the job that the user names, or the job that `meshwright init` would write for the model."""
    from meshwright.compat.lightning_job import load_plain_job
    from meshwright.job import load_job

    if is_model_name(word):
        from meshwright.zoo.job_text import job_text

        return load_job(word, settings, job_text(word, global_batch, sequence, image))
    for name, value, field in (
        ("--global-batch", global_batch, "train.global_batch=N"),
        ("--sequence", sequence, "A.B=N with the job's own field"),
        ("--image", image, "A.B=N with the job's own field"),
    ):
        if value is not None:
            raise InputError(
                f"{name} {value}: this option is for models such as hf:llama; for a job, use --set {field}"
            )
    return load_plain_job(find_job(word), settings, "plan")

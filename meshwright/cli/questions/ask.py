"""`meshwright ask`: questions about the plans for a job or a model. Each is a command; all of them take the options
that constrain plans."""

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
    OptionsOnce,
    SequenceLength,
    Settings,
    check_page,
    path_argument,
    path_option,
)
from meshwright.cli.plan_problem import PlanRequest, SampleSizes, load_problem, rare_collection
from meshwright.cli.questions import options
from meshwright.cli.questions.options import Avoid, Fix, MaxMemory, Precision, plan_settings, read_constraints
from meshwright.cli.questions.plan_questions import PlanQuestion, answer_question, print_answer
from meshwright.cli.ready_jobs import complete_job_or_model

ask = typer.Typer(
    help="Ask about plans: how far a job scales, what it costs, which batch fits, what another cluster would change.",
    no_args_is_help=True,
)

Job = Annotated[
    str,
    typer.Argument(
        metavar="JOB|MODEL",
        help="A job, as for train; or a model: hf:FOLDER, hf:llama, timm:NAME or torchvision:NAME.",
        autocompletion=complete_job_or_model,
    ),
]
Html = Annotated[Path | None, path_option("--html", "FILE", "Write a page with a chart of the answer to this file.")]
Exact = Annotated[bool, typer.Option("--exact", help="Only plans that compute the same values as one device.")]


@dataclass(frozen=True)
class Asked:
    """What every question has in common: whose plans, on which cluster, with which constraints, and where the answer
    goes."""

    job: str
    cluster: str | None
    settings: list[str]
    constraints: tuple[list[str] | None, list[str] | None, str | None, str | None]
    sizes: SampleSizes
    exact: bool
    html: Path | None
    as_json: bool


def print_answer_to(question: PlanQuestion, asked: Asked) -> None:
    """Has a question answered, and prints the answer."""
    from meshwright.progress import phase

    if asked.html:
        check_page(asked.html)
    job_settings, fixed = plan_settings(asked.settings)
    fix, avoid, max_memory, precision = asked.constraints
    constraints = read_constraints([*fixed, *(fix or [])], avoid or [], max_memory, precision)
    with rare_collection():
        with phase("importing PyTorch"):
            import meshwright.auto.choose  # noqa: F401
        begin = perf_counter()
        question.check(asked.cluster)
        machines = question.read_clusters(asked.cluster)[0] if question.goal else asked.cluster
        problem = load_problem(
            PlanRequest(asked.job, job_settings, asked.sizes, constraints, machines, None, asked.exact)
        )
        with phase("answering the question"):
            answer = answer_question(question, problem)
        seconds = round(perf_counter() - begin, 3)
        print_answer(answer, asked.html, problem.request.title, seconds, asked.as_json)


@ask.command("sweep", cls=OptionsOnce)
def sweep(
    job: Job,
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT=VALUES",
            help="devices=1..64, nodes=1,2,4, link=200G,400G, gpu=A100-80GB,H100, batch=64..1024 or"
            " sequence=1024,4096.",
        ),
    ],
    cluster: ClusterName = None,
    what_if: options.WhatIf = None,
    price: options.Price = None,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    exact: Exact = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    html: Html = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """How far does it scale? The best plan for each of several numbers of devices or machines, links, kinds of devices,
    batches or sequences."""
    sizes = SampleSizes(global_batch, sequence, image)
    constraints = fix, avoid, max_memory, precision
    asked = Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json)
    print_answer_to(PlanQuestion(sweep=what, what_if=tuple(what_if or ()), price=price), asked)


@ask.command("for", cls=OptionsOnce)
def for_(
    job: Job,
    goal: Annotated[str, typer.Argument(metavar="time|cost|devices", help="What the cluster is chosen for.")],
    clusters: options.Clusters = None,
    cluster: ClusterName = None,
    price: options.Price = None,
    tokens: options.Tokens = None,
    samples: options.Samples = None,
    epochs: options.Epochs = None,
    deadline: options.Deadline = None,
    budget: options.Budget = None,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    exact: Exact = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    html: Html = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """What does a run cost, and which cluster is the fastest, cheapest or smallest for it? With --cluster, the time and
    the cost of the run on that one; with --clusters, the choice among them."""
    question = PlanQuestion(
        goal=goal,
        clusters=clusters,
        price=price,
        tokens=tokens,
        samples=samples,
        epochs=epochs,
        deadline=deadline,
        budget=budget,
    )
    sizes = SampleSizes(global_batch, sequence, image)
    constraints = fix, avoid, max_memory, precision
    asked = Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json)
    print_answer_to(question, asked)


@ask.command("batch", cls=OptionsOnce)
def batch(
    job: Job,
    cluster: ClusterName = None,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    exact: Exact = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    html: Html = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Which is the largest batch that fits under each kind of plan, and how fast is it?"""
    sizes = SampleSizes(global_batch, sequence, image)
    constraints = fix, avoid, max_memory, precision
    asked = Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json)
    print_answer_to(PlanQuestion(batch="max"), asked)


@ask.command("what-if", cls=OptionsOnce)
def what_if(
    job: Job,
    changes: Annotated[
        list[str],
        typer.Argument(
            metavar="CHANGE...",
            help="link=2x (the network), within=2x (the links in a machine), compute=2x, memory=2x or memory=141GB.",
        ),
    ],
    cluster: ClusterName = None,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    exact: Exact = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    html: Html = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """What would another cluster change? The best plan as the cluster is, and with each change."""
    sizes = SampleSizes(global_batch, sequence, image)
    constraints = fix, avoid, max_memory, precision
    asked = Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json)
    print_answer_to(PlanQuestion(changes=tuple(changes)), asked)


@ask.command("explain", cls=OptionsOnce)
def explain(
    job: Job,
    first: Annotated[Path, path_argument("FILE_A", "A plan.")],
    second: Annotated[Path, path_argument("FILE_B", "Another plan.")],
    cluster: ClusterName = None,
    fix: Fix = None,
    avoid: Avoid = None,
    max_memory: MaxMemory = None,
    precision: Precision = None,
    exact: Exact = False,
    global_batch: GlobalBatch = None,
    sequence: SequenceLength = None,
    image: ImageSize = None,
    html: Html = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Why is one of two plans faster than the other? Both, term by term."""
    sizes = SampleSizes(global_batch, sequence, image)
    constraints = fix, avoid, max_memory, precision
    asked = Asked(job, cluster, settings or [], constraints, sizes, exact, html, as_json)
    print_answer_to(PlanQuestion(plans=(first, second)), asked)

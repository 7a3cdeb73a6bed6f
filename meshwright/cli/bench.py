"""`meshwright bench`: what is fastest on this machine for a job, and how fast data is loaded, each compared with a
reference in the same run."""

import json
from pathlib import Path
from typing import Annotated

import typer

from meshwright.cli.options import AsJson, ClusterName, JobFile, Settings, check_output, path_option
from meshwright.cli.text import console, print_lines
from meshwright.numbers.limits import LARGEST_COUNT
from meshwright.progress import phase

MOST_REPETITIONS = 1_000_000
DEFAULT_MINUTES = 4.0
Output = Annotated[
    Path | None, path_option("--output", "FILE", "Also write the JSON object to this file, for meshwright report.")
]
Rounds = Annotated[
    int,
    typer.Option(
        min=1, max=MOST_REPETITIONS, metavar="N", help="The number of alternating rounds. Medians are reported."
    ),
]

bench = typer.Typer(help="Measure speed, and compare it with a reference in the same run.", no_args_is_help=True)


@bench.command()
def strategies(
    job: JobFile,
    cluster: ClusterName = None,
    ranks: Annotated[
        str | None,
        typer.Option(metavar="1,2,4", help="The numbers of devices to compare; by default all of the cluster."),
    ] = None,
    precision: Annotated[
        str, typer.Option(metavar="fp32,bf16", help="The precisions of each strategy: fp32, tf32, bf16, fp16.")
    ] = "fp32",
    only: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Compare only these; `pipeline` is every schedule. One device is always run."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=2, max=MOST_REPETITIONS, metavar="N", help="The timed steps of one measurement; by default about 1 s."
        ),
    ] = None,
    rounds: Rounds = 3,
    minutes: Annotated[
        float, typer.Option(min=0, help="Begin no further round that would end after this time.")
    ] = DEFAULT_MINUTES,
    output: Output = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train the same global batches with every strategy, and compare speed, loss, memory and communication.

    \b
    single device  one rank on one device; all others are compared with it
    plain loop     one device, PyTorch without Meshwright
    DataParallel   one process for all devices (on CPUs: a thread for each)
    all cores      one process whose operators use all cores (CPUs only)
    replicate      every device has the whole model; by all-reduce algorithm
    servers        as replicate, with a parameter server; (a)synchronous
    shard          as replicate, with state divided; by what is divided
    tensor         layers are split over all devices
    pipeline       consecutive stages on all devices; by schedule
    hybrid         the best plan that combines several of these
    auto           the plan that `train` uses for a job with `plan: auto`

    Strategies that cannot train this job are listed with the reason. For a
    cluster that is not this machine, such as 8xV100-16GB, all is predicted.
    """
    from meshwright.cli.job_file import load_plain_job
    from meshwright.processes.local.fork_server import preloaded

    if output:
        check_output(output)
    loaded_job = load_plain_job(job, settings or [], "bench")
    with preloaded("meshwright.bench.strategies.rank"):
        from meshwright.bench.strategies.catalog import selected_strategies
        from meshwright.bench.strategies.compare import Settings as Comparison
        from meshwright.bench.strategies.compare import compare
        from meshwright.bench.strategies.machines import is_local, machines_of_ranks, parse_precisions
        from meshwright.bench.strategies.show import show

        names, precisions = selected_strategies(only), parse_precisions(precision)
        machines = machines_of_ranks(cluster or loaded_job.cluster, ranks)
        comparison = Comparison(names, precisions, steps, rounds, 60 * minutes)
        report = compare(loaded_job, machines, comparison, only_predict=not is_local(machines))
    text = json.dumps(report.to_json())
    write_output(text, output)
    if as_json:
        print(text, flush=True)
    else:
        show(report, console())


@bench.command()
def loading(
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_REPETITIONS, help="The number of alternating rounds. Medians are reported.")
    ] = 7,
    rows: Annotated[
        int, typer.Option(min=1, max=LARGEST_COUNT, metavar="N", help="The number of rows in the NumPy array.")
    ] = 10_000_000,
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Compare the loading of pictures with torchvision's loader, and measure the loading of rows of a large array."""
    from dataclasses import asdict

    from meshwright.bench.loading import measure, report_lines

    if output:
        check_output(output)
    with phase("benching: loading pictures and rows"):
        measured = measure(rounds, (0, 2), rows)
    summary = {f"{row.what}, {row.workers} workers": row.ratio or row.samples_per_s for row in measured}
    text = json.dumps({"rows": [asdict(row) for row in measured], "summary": summary})
    write_output(text, output)
    if as_json:
        print(text, flush=True)
        return
    print_lines(report_lines(measured))


def write_output(text: str, output: Path | None) -> None:
    """Writes the JSON object to the file of `--output`, if there is one."""
    if output is not None:
        from meshwright.files.storage import write_atomically

        write_atomically(output, text)

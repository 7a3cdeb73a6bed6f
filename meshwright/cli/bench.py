"""`meshwright bench`: measurements, always beside a reference in the same run."""

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.cli.choice import asked_of, chosen_plan
from meshwright.cli.options import AsJson, ClusterName, JobFile, Settings

if TYPE_CHECKING:  # rooms are loaded by the command that needs them
    from meshwright.plan import Plan
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.question import Question

bench = typer.Typer(help="Measure, always beside a reference in the same run.", no_args_is_help=True)


@bench.command()
def strategies(
    job: JobFile,
    cluster: ClusterName = None,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Only these strategies; the bare loop is always measured.")
    ] = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of one measurement.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")] = 5,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job in several ways, beside a bare PyTorch loop.

    \b
    one rank   the job as one process trains it
    threads    one process, a thread for each device: DataParallel
    replicate  every device has the whole model and a part of each batch
    shard      likewise, with weights, gradients and optimizer state divided
    tensor     layers are split over all devices
    pipeline   the model is cut into a stage for each device, 1f1b
    auto       the plan that `train` takes where the job says `plan: auto`

    A strategy that the model cannot be divided by is named with the reason.
    """
    from dataclasses import asdict
    from functools import cache

    from meshwright.bench.strategies import chosen, compare, lines
    from meshwright.bench.strategy_plans import plan_for
    from meshwright.calibrate.probe import measure
    from meshwright.cluster.detect import find
    from meshwright.job import load_job

    read, names = load_job(job, settings or []), chosen(only)
    found = find(cluster or read.cluster, measure)

    @cache
    def asked() -> "tuple[Question, Profiles]":
        return asked_of(read, found, exact=True)

    def plan_of(name: str) -> "Plan":
        return chosen_plan(read, found, "auto")[0] if name == "auto" else plan_for(name, found.devices, asked)

    rows, skipped = compare(read, found, names, plan_of, steps, rounds)
    if as_json:
        summary = {row.strategy: round(row.ratio, 4) for row in rows}
        told = {"rows": [asdict(row) for row in rows], "summary": summary, "skipped": [asdict(one) for one in skipped]}
        print(json.dumps(told), flush=True)
        return
    for line in lines(rows, skipped):
        print(line, flush=True)


@bench.command()
def collectives(
    ranks: Annotated[int, typer.Option(metavar="N", help="So many ranks are started here.")] = 2,
    nodes: Annotated[
        int | None, typer.Option(min=1, metavar="M", help="Treat the ranks as so many nodes of equal size.")
    ] = None,
    sizes: Annotated[str | None, typer.Option(metavar="1K,4M", help="Bytes; else 1 KiB to 64 MiB.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")] = 7,
    in_training: Annotated[
        bool, typer.Option("--in-training", help="Also what the exchange costs training the MNIST net.")
    ] = False,
    openmpi: Annotated[
        bool | None, typer.Option(help="Also OpenMPI; else where mpirun and mpi4py are there and ranks are started.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Combine tensors by every algorithm, beside the backend's own all-reduce; and predict it from single messages.

    Ranks are started here, or are those of the world that this command was launched in (torchrun, RANK and
    WORLD_SIZE); then its first rank prints.
    """
    from rich.console import Console

    from meshwright.bench.collectives.compare import measured_here, measured_joined, parse_sizes, rows_of, told
    from meshwright.bench.collectives.openmpi import is_there, openmpi_rows
    from meshwright.bench.collectives.rank import Asked
    from meshwright.bench.collectives.show import show
    from meshwright.launch.world import is_launched

    asked = Asked(nodes, parse_sizes(sizes), rounds, in_training=in_training)
    found = measured_joined(asked) if is_launched() else measured_here(asked, ranks)
    if found is None:
        return
    rows = rows_of(found)
    if openmpi or (openmpi is None and is_there() and not is_launched()):
        rows = openmpi_rows(rows, rounds)
    if as_json:
        print(json.dumps(told(rows, found)), flush=True)
    else:
        show(rows, found, Console(width=None if sys.stdout.isatty() else 200))


@bench.command()
def loading(
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")] = 7,
    rows: Annotated[int, typer.Option(min=1, metavar="N", help="Rows of the NumPy array.")] = 10_000_000,
    as_json: AsJson = False,
) -> None:
    """Load pictures beside torchvision's loader, and rows of a large array."""
    from dataclasses import asdict

    from meshwright.bench.loading import lines, measure

    found = measure(rounds, (0, 2), rows)
    if as_json:
        summary = {f"{row.what}, {row.workers} workers": row.ratio or row.samples_per_s for row in found}
        print(json.dumps({"rows": [asdict(row) for row in found], "summary": summary}), flush=True)
        return
    for line in lines(found):
        print(line, flush=True)

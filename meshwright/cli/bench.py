"""`meshwright bench`: measurements, each compared with a reference in the same run."""

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.options import AsJson, ClusterName, JobFile, Settings, path_option
from meshwright.limits import LARGEST_COUNT, MOST_RANKS_HERE

MOST_REPETITIONS = 1_000_000
Rounds = Annotated[
    int,
    typer.Option(min=1, max=MOST_REPETITIONS, help="The number of alternating rounds. Medians are reported."),
]

bench = typer.Typer(help="Measure speed, and compare it with a reference in the same run.", no_args_is_help=True)


@bench.command()
def strategies(
    job: JobFile,
    cluster: ClusterName = None,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Measure only these strategies. The bare loop is always measured.")
    ] = None,
    steps: Annotated[
        int, typer.Option(min=2, max=MOST_REPETITIONS, help="The number of steps of one measurement.")
    ] = 30,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_REPETITIONS, help="The number of alternating rounds. Medians are reported.")
    ] = 5,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare ways to train a job with a bare PyTorch loop.

    \b
    one rank   the job as `train` runs it in one process
    threads    one process with a thread for each device, as DataParallel does
    replicate  every device has the whole model and a part of each batch
    shard      as replicate, with weights, gradients and optimizer state divided
    tensor     layers are split over all devices
    pipeline   the model is cut into one stage for each device, 1f1b
    auto       the plan that `train` uses for a job with `plan: auto`

    Strategies that cannot train this job are listed with the reason.
    """
    from dataclasses import asdict

    from meshwright.compat.lightning_job import load_plain_job
    from meshwright.launch.local.fork_server import preloaded

    loaded_job = load_plain_job(job, settings or [], "bench")
    with preloaded("meshwright.train.rank"):
        from meshwright.bench.strategies import compare, report_lines, selected_strategies
        from meshwright.bench.strategy_plans import strategy_plan
        from meshwright.calibrate.probe import measure_machine
        from meshwright.cluster.detect import find_cluster

        names = selected_strategies(only)
        machines = find_cluster(cluster or loaded_job.cluster, measure_machine)
        rows, skipped = compare(
            loaded_job, machines, names, lambda name, parts: strategy_plan(name, parts, machines), steps, rounds
        )
    if as_json:
        result = {
            "rows": [asdict(row) for row in rows],
            "summary": {row.strategy: round(row.ratio, 4) for row in rows},
            "skipped": [asdict(strategy) for strategy in skipped],
        }
        print(json.dumps(result), flush=True)
        return
    for line in report_lines(rows, skipped):
        print(line, flush=True)


@bench.command()
def peers(
    job: JobFile,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS_HERE, metavar="N", help="The number of ranks; by default one per device."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(metavar="A,B", help="Measure only these peers. Plain DDP is always measured.")
    ] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="The precision in which all train.")] = "fp32",
    steps: Annotated[
        int, typer.Option(min=2, max=MOST_REPETITIONS, help="The number of timed steps of one measurement.")
    ] = 60,
    rounds: Rounds = 5,
    python: Annotated[
        Path | None,
        path_option("--python", "FILE", "The interpreter that has the peers; by default that of `make peers`."),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Compare with other libraries that train the same model on the same batches.

    \b
    ddp         plain PyTorch DistributedDataParallel, the reference
    accelerate  Hugging Face Accelerate
    fabric      Lightning Fabric
    trainer     Lightning Trainer
    deepspeed   DeepSpeed
    fsdp2       PyTorch's FSDP2 and torch.compile, applied by hand

    Each is measured at its defaults and with the options that its documentation recommends for speed. Final losses must
    agree. `make peers` installs the peers; those that are not installed are listed with the command that installs them.
    """
    from meshwright.compat.lightning_job import load_plain_job
    from meshwright.launch.local.fork_server import preloaded

    loaded_job = load_plain_job(job, settings or [], "bench")
    with preloaded("meshwright.train.rank"):
        from meshwright.bench.peers.catalog import find_interpreter, selected_peers
        from meshwright.bench.peers.compare import cluster_of_ranks, compare
        from meshwright.bench.peers.rows import report_lines

        chosen = selected_peers(only)
        interpreter = find_interpreter(python)
        report = compare(
            loaded_job,
            cluster_of_ranks(ranks),
            chosen,
            interpreter,
            precision=precision,
            steps=steps,
            rounds=rounds,
        )
    for line in [json.dumps(report.to_json())] if as_json else report_lines(report):
        print(line, flush=True)


@bench.command()
def collectives(
    ranks: Annotated[
        int, typer.Option(max=MOST_RANKS_HERE, metavar="N", help="The number of ranks to start on this machine.")
    ] = 2,
    nodes: Annotated[
        int | None,
        typer.Option(min=1, max=MOST_RANKS_HERE, metavar="M", help="Treat the ranks as M nodes of equal size."),
    ] = None,
    sizes: Annotated[
        str | None, typer.Option(metavar="1K,4M", help="Message sizes in bytes; by default 1 KiB to 64 MiB.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_REPETITIONS, help="The number of alternating rounds. Medians are reported.")
    ] = 7,
    in_training: Annotated[
        bool,
        typer.Option("--in-training", help="Also measure the time it adds to training steps of the MNIST net."),
    ] = False,
    openmpi: Annotated[
        bool | None, typer.Option(help="Also measure OpenMPI; by default if mpirun and mpi4py are installed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every all-reduce algorithm with the backend's, and with a prediction from the speed of single messages.

    Ranks are started on this machine. If torchrun or another launcher started this command, its ranks are used instead,
    and the first of them prints.
    """
    from rich.console import Console

    from meshwright.bench.collectives.compare import (
        json_report,
        make_rows,
        measure_in_launched_ranks,
        measure_in_new_ranks,
        parse_sizes,
    )
    from meshwright.bench.collectives.openmpi import is_installed, openmpi_rows
    from meshwright.bench.collectives.rank import MeasurementRequest
    from meshwright.bench.collectives.show import show
    from meshwright.launch.world import is_launched

    request = MeasurementRequest(nodes, parse_sizes(sizes), rounds, in_training=in_training)
    measured = measure_in_launched_ranks(request) if is_launched() else measure_in_new_ranks(request, ranks)
    if measured is None:  # every rank but the first
        return
    rows = make_rows(measured)
    if openmpi or (openmpi is None and is_installed() and not is_launched()):
        rows = openmpi_rows(rows, rounds)
    if as_json:
        print(json.dumps(json_report(rows, measured)), flush=True)
    else:
        show(rows, measured, Console(width=None if sys.stdout.isatty() else 200))


@bench.command()
def loading(
    rounds: Annotated[
        int, typer.Option(min=1, max=MOST_REPETITIONS, help="The number of alternating rounds. Medians are reported.")
    ] = 7,
    rows: Annotated[
        int, typer.Option(min=1, max=LARGEST_COUNT, metavar="N", help="The number of rows in the NumPy array.")
    ] = 10_000_000,
    as_json: AsJson = False,
) -> None:
    """Compare the loading of pictures with torchvision's loader, and measure the loading of rows of a large array."""
    from dataclasses import asdict

    from meshwright.bench.loading import measure, report_lines

    measured = measure(rounds, (0, 2), rows)
    if as_json:
        summary = {f"{row.what}, {row.workers} workers": row.ratio or row.samples_per_s for row in measured}
        print(json.dumps({"rows": [asdict(row) for row in measured], "summary": summary}), flush=True)
        return
    for line in report_lines(measured):
        print(line, flush=True)

"""`meshwright bench`: measurements, each compared with a reference in the same run."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.options import AsJson, ClusterName, JobFile, PlanFile, Settings, check_output, path_option
from meshwright.cli.text import console, print_lines
from meshwright.numbers.limits import LARGEST_COUNT, MOST_RANKS_HERE
from meshwright.progress import phase

MOST_REPETITIONS = 1_000_000
MOST_KILLS = 10_000
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
    from meshwright.compat.lightning_job import load_plain_job
    from meshwright.launch.local.fork_server import preloaded

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
    _write(text, output)
    if as_json:
        print(text, flush=True)
    else:
        show(report, console())


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
    output: Output = None,
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

    Each is measured at its defaults and with the options that its
    documentation recommends for speed. Final losses must agree. `make peers`
    installs the peers; one that is missing is listed with the command.
    """
    from meshwright.compat.lightning_job import load_plain_job
    from meshwright.launch.local.fork_server import preloaded

    if output:
        check_output(output)
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
    text = json.dumps(report.to_json())
    _write(text, output)
    if as_json:
        print(text, flush=True)
    else:
        print_lines(report_lines(report))


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
    output: Output = None,
    as_json: AsJson = False,
) -> None:
    """Compare every all-reduce algorithm with the backend's, and with a prediction from the speed of single messages.

    Ranks are started on this machine. If torchrun or another launcher starts
    this command, its ranks are used instead, and the first of them prints.
    """
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

    if output:
        check_output(output)
    request = MeasurementRequest(nodes, parse_sizes(sizes), rounds, in_training=in_training)
    if is_launched():
        measured = measure_in_launched_ranks(request)
    else:
        with phase(f"benching: collectives of {ranks} ranks in {rounds} rounds"):
            measured = measure_in_new_ranks(request, ranks)
    if measured is None:  # every rank but the first
        return
    rows = make_rows(measured)
    if openmpi or (openmpi is None and is_installed() and not is_launched()):
        rows = openmpi_rows(rows, rounds)
    text = json.dumps(json_report(rows, measured))
    _write(text, output)
    if as_json:
        print(text, flush=True)
    else:
        show(rows, measured, console())


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
    _write(text, output)
    if as_json:
        print(text, flush=True)
        return
    print_lines(report_lines(measured))


@bench.command()
def faults(
    job: JobFile,
    kills: Annotated[int, typer.Option(min=1, max=MOST_KILLS, metavar="N", help="How many ranks to kill.")] = 10,
    without_spare: Annotated[
        int,
        typer.Option(min=0, max=MOST_KILLS, metavar="N", help="Kills of another run without the spare process."),
    ] = 3,
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_COUNT, help="Decides which ranks are killed, and when.")] = 0,
    plan: PlanFile = None,
    cluster: ClusterName = None,
    keep: Annotated[
        Path | None, path_option("--keep", "FOLDER", "Keep the runs in this folder; by default they are deleted.")
    ] = None,
    output: Output = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Kill ranks of a job at random moments, and measure how long it takes until it goes on.

    Ranks are killed between steps and inside of them, in saves, evaluations,
    starts and restarts. The run has to end by itself, without a checkpoint
    lost, with bitwise the weights of an undisturbed run, and without leaving
    processes or files; otherwise the exit code is 3. The job is trained three
    times: undisturbed, with kills, and with kills but without the spare
    process (train.spare). Checkpoints are saved every 10 steps, and
    evaluations are every 40, unless --set says otherwise.
    """
    import tempfile

    from meshwright.bench.faults.measure import FaultRequest, measure
    from meshwright.compat.lightning_job import load_plain_job

    if output:
        check_output(output)
    name = load_plain_job(job, settings or [], "bench").name
    plan_file = str(plan) if plan else None
    request = FaultRequest(str(job), name, plan_file, cluster, settings or [], kills, without_spare, seed)
    with tempfile.TemporaryDirectory(prefix="meshwright-faults-") as folder:
        report = measure(request, Path(keep or folder), phase)
    text = json.dumps(report.to_json())
    _write(text, output)
    if as_json:
        print(text, flush=True)
    else:
        print_lines(report.lines())
    if not report.is_good:
        raise typer.Exit(3)


def _write(text: str, output: Path | None) -> None:
    """Writes the JSON object to the file of `--output`, if there is one."""
    if output is not None:
        from meshwright.files.storage import write_atomically

        write_atomically(output, text)

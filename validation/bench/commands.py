"""`python -m validation.bench`: how fast Meshwright is beside other libraries (`peers`), its all-reduces beside others
(`collectives`), and how a run survives kills (`faults`). `page FILE` makes the page of what they wrote."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from meshwright.cli.bench import MOST_REPETITIONS, Output, Rounds, write_output
from meshwright.cli.options import (
    AsJson,
    ClusterName,
    JobFile,
    PlanFile,
    Settings,
    check_output,
    path_argument,
    path_option,
)
from meshwright.cli.text import console, print_lines
from meshwright.numbers.limits import LARGEST_COUNT, MOST_RANKS_HERE
from meshwright.progress import phase

MOST_KILLS = 10_000

bench = typer.Typer(help="Measure Meshwright itself.", no_args_is_help=True, add_completion=False)


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
    from meshwright.cli.job_file import load_plain_job
    from meshwright.processes.local.fork_server import preloaded

    if output:
        check_output(output)
    loaded_job = load_plain_job(job, settings or [], "bench")
    with preloaded("meshwright.train.rank"):
        from validation.bench.peers.catalog import find_interpreter, selected_peers
        from validation.bench.peers.compare import cluster_of_ranks, compare
        from validation.bench.peers.rows import report_lines

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
    write_output(text, output)
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
    from meshwright.processes.world import is_launched
    from validation.bench.collectives.compare import (
        json_report,
        make_rows,
        measure_in_launched_ranks,
        measure_in_new_ranks,
        parse_sizes,
    )
    from validation.bench.collectives.openmpi import is_installed, openmpi_rows
    from validation.bench.collectives.rank import MeasurementRequest
    from validation.bench.collectives.show import show

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
    write_output(text, output)
    if as_json:
        print(text, flush=True)
    else:
        show(rows, measured, console())


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

    from meshwright.cli.job_file import load_plain_job
    from validation.bench.faults.measure import FaultRequest, measure

    if output:
        check_output(output)
    name = load_plain_job(job, settings or [], "bench").name
    plan_file = str(plan) if plan else None
    request = FaultRequest(str(job), name, plan_file, cluster, settings or [], kills, without_spare, seed)
    with tempfile.TemporaryDirectory(prefix="meshwright-faults-") as folder:
        report = measure(request, Path(keep or folder), phase)
    text = json.dumps(report.to_json())
    write_output(text, output)
    if as_json:
        print(text, flush=True)
    else:
        print_lines(report.lines())
    if not report.is_good:
        raise typer.Exit(3)


@bench.command()
def page(
    file: Annotated[Path, path_argument("FILE", "What one of these commands has written.")],
    output: Annotated[Path | None, path_option("--output", "FILE", "The page; by default beside FILE.")] = None,
) -> None:
    """Write the page of a measurement: one HTML file, which opens without a network."""
    from meshwright.report.page import write_page
    from validation.bench.pages import page_of

    write_page(page_of(file), output or file.with_suffix(".html"))

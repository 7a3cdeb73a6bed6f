"""The command line: reads arguments, calls the rooms, prints. Exit 0 done, 2 the input is wrong, 3 a proof
failed, 1 anything else."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from meshwright.errors import InputError, MeshwrightError

if TYPE_CHECKING:  # rooms are loaded by the command that needs them
    from meshwright.cluster.cluster import Cluster
    from meshwright.job import Job
    from meshwright.plan import Plan
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.question import Question

app = typer.Typer(
    help="Plan, prove and run distributed training of any PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure, always beside a reference in the same run.", no_args_is_help=True)
app.add_typer(bench, name="bench")

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override any field of the job; repeatable."),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Train with this plan.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", metavar="C", help="local, 3xcpu, 8xH100, or a YAML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")]


@app.command()
def train(
    job: JobFile,
    plan: PlanFile = None,
    cluster: ClusterName = None,
    resume: Annotated[
        str,
        typer.Option(
            metavar="auto|never|DIR",
            help="Go on with the newest unfinished run of this job, start a new one, or go on with that run.",
        ),
    ] = "auto",
    record: Annotated[
        int, typer.Option(min=0, metavar="K", help="Write down the first K steps, for prove --against.")
    ] = 0,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job on this machine's devices, or as a rank where torchrun started this command."""
    from meshwright.cluster.detect import find
    from meshwright.job import load_job, load_plan
    from meshwright.launch.world import is_launched

    read = load_job(job, settings or [])
    found = find(cluster or read.cluster)
    given = load_plan(plan) if plan else read.plan
    if is_launched():
        from meshwright.train.joined import train_joined

        result = train_joined(read, None if given == "auto" else given, found, resume, record)
    else:
        from meshwright.train.run import train as run

        chosen, predicted_s = _chosen(read, found, given)
        result = run(read, chosen, found, resume, predicted_s, record)
    if result is not None:
        _print_result(result, as_json)


@app.command()
def plan(
    job: JobFile,
    cluster: ClusterName = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Predict this plan alone.")] = None,
    top: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 5,
    exact: Annotated[bool, typer.Option("--exact", help="Only plans that leave the numbers as they are.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the report as a page.")] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest plan for a job on any cluster, without it: ranked plans, and why the others were rejected."""
    from time import perf_counter

    from rich.console import Console

    from meshwright.cluster.detect import find
    from meshwright.cluster.probe import measure
    from meshwright.job import load_job, load_plan
    from meshwright.planner.answer import answer, of_one, show
    from meshwright.planner.question import with_own_operators
    from meshwright.planner.search import search

    if html:
        raise InputError(f"--html {html}: pages are not written yet, use --json")
    begun = perf_counter()
    read = load_job(job, settings or [])
    given = load_plan(plan) if plan else None
    asked, profiles = _asked(read, find(cluster or read.cluster, measure), exact=exact, top=top)
    question = with_own_operators(asked, profiles)
    answered = of_one(given, question, profiles) if given else answer(search(question, profiles), question, profiles)
    told = {**answered.to_dict(), "seconds": round(perf_counter() - begun, 3)}
    if as_json:
        print(json.dumps(told), flush=True)
    else:
        show(answered, question, Console(width=None if sys.stdout.isatty() else 200), told["seconds"])


@app.command()
def prove(
    job: Annotated[Path | None, typer.Argument(metavar="JOB", help="The job's YAML file.")] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Prove this plan.")] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="At most so many ranks: larger axes are shrunk.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, metavar="K", help="How many steps to compare.")] = 3,
    dtype: Annotated[
        str, typer.Option(metavar="fp64|fp32|plan", help="The precision of the comparison; plan: its own.")
    ] = "fp64",
    dropout: Annotated[bool, typer.Option("--dropout", help="Leave dropout on.")] = False,
    against: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="RUN_A RUN_B", help="Hold one recorded run against another, which is taken as right."),
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Show that a job trains under its plan as on one device: each loss, gradient, buffer and weight. Exit 3 if not,
    with the first difference and its cause."""
    from rich.console import Console

    from meshwright.cluster.detect import find
    from meshwright.job import load_job, load_plan
    from meshwright.proof.proof import save
    from meshwright.proof.prove import prove as run
    from meshwright.proof.show import show

    if (job is None) == (against is None):
        raise InputError("prove takes a JOB, or two recorded runs: --against RUN_A RUN_B")
    if against is not None:
        from meshwright.proof.against import against as compare

        proof = compare(*against)
        file = save(proof, against[1], "against")
    else:
        assert job is not None
        read = load_job(job, settings or [])
        given = load_plan(plan) if plan else read.plan
        chosen = _chosen(read, find(read.cluster), given)[0] if given == "auto" else given
        proof = run(read, chosen, ranks=ranks, steps=steps, dtype=dtype, dropout=dropout)
        file = save(proof, Path(read.output), read.name)
    if as_json:
        print(json.dumps({**proof.to_dict(), "file": str(file)}), flush=True)
    else:
        show(proof, Console(width=None if sys.stdout.isatty() else 200))
        print(f"saved in {file}", flush=True)
    raise typer.Exit(proof.exit_code)


def _asked(job: "Job", cluster: "Cluster", *, exact: bool = False, top: int = 1) -> "tuple[Question, Profiles]":
    """A job's model, batch and optimizer, as the planner takes them: without memory, where the model allows it."""
    import torch

    from meshwright.call import bind
    from meshwright.planner.profiles import Profiles
    from meshwright.planner.question import Question
    from meshwright.simulator.predict import cost_of as optimizer_of
    from meshwright.train.build import build_data, freeze, make_model, sample_batch
    from meshwright.train.optimizer import build_optimizer

    data, _ = build_data(job)
    sample = sample_batch(job, data)
    try:
        with torch.device("meta"):
            model = make_model(job)
    except MeshwrightError:
        raise
    except Exception:  # some models cannot be built without memory
        model = make_model(job)
    freeze(model, job.train.freeze)
    loss = bind(job.loss, "loss") if job.loss else None
    on_gpu = cluster.kind == "cuda"
    try:
        optimizer = build_optimizer(job.optimizer, model)
    except (TypeError, ValueError) as error:
        raise InputError(f"optimizer: {error}") from error
    question = Question(
        cluster,
        job.train.global_batch,
        optimizer_of(optimizer, on_gpu),
        exact=exact,
        top=top,
        samples=len(data) if hasattr(data, "__len__") else None,
    )
    return question, Profiles(model, sample, loss, job.data.target, on_gpu)


def _chosen(job: "Job", cluster: "Cluster", given: "Plan | Literal['auto']") -> "tuple[Plan, float | None]":
    """The plan to run, and the seconds that a step of it is predicted to take, where the machine has been measured.
    `auto` is the best of what this version runs and what leaves the numbers as they are; every device a replica on a
    machine that nobody has measured, or for a model that cannot be predicted."""
    from dataclasses import replace

    from meshwright.parallel.check import checker
    from meshwright.planner.search import replicas, search
    from meshwright.simulator.predict import predict_plan

    chosen = replicas(cluster.devices, job.train.global_batch) if given == "auto" else given
    if not all(node.device.is_known for node in cluster.nodes):
        if given == "auto":
            said = f"plan: {chosen.summary()}, as nobody has measured this machine (meshwright doctor does)"
            print(said, file=sys.stderr)
        return chosen, None
    try:
        question, profiles = _asked(job, cluster, exact=True)
    except Exception:  # whatever a job's own code raises: the checks before a run say what is wrong with it
        return chosen, None
    try:
        if given == "auto":
            refuses = checker(profiles.model, profiles.sample, profiles.target)
            best = search(replace(question, even=False, refuses=refuses), profiles).ranked[0]
            return best.plan, best.prediction.step_s
        if chosen.numerics.precision == "auto":
            return chosen, None  # the run measures which it is
        profile = profiles.get(chosen.numerics.precision, chosen.memory.recompute)
        taken = cluster.with_devices(min(chosen.world_size, cluster.devices))
        return chosen, predict_plan(taken, profile, chosen, question.global_batch, question.optimizer).step_s
    except MeshwrightError:  # it cannot be traced, or fits no plan as predicted: the run itself has the last word
        return chosen, None


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
    from meshwright.cluster.detect import find
    from meshwright.cluster.probe import measure
    from meshwright.job import load_job

    read, names = load_job(job, settings or []), chosen(only)
    found = find(cluster or read.cluster, measure)

    @cache
    def asked() -> "tuple[Question, Profiles]":
        return _asked(read, found, exact=True)

    def plan_of(name: str) -> "Plan":
        return _chosen(read, found, "auto")[0] if name == "auto" else plan_for(name, found.devices, asked)

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

    from meshwright.bench.collectives import measured_here, measured_joined, parse_sizes, rows_of, told
    from meshwright.bench.collectives_openmpi import is_there, openmpi_rows
    from meshwright.bench.collectives_rank import Asked
    from meshwright.bench.collectives_show import show
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
def predictions(
    everything: Annotated[bool, typer.Option("--all", help="Every published row: this takes an hour.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score the predictor on published training runs, each source by factors from the others."""
    from meshwright.bench.predictions.report import as_json as told
    from meshwright.bench.predictions.report import lines, report

    made = report(everything, progress=lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print(json.dumps(told(made)), flush=True)
        return
    for line in lines(made):
        print(line, flush=True)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder that train wrote.")],
    to: Annotated[str, typer.Option("--to", metavar="safetensors|bf16|int8|int16|program", help="The file's format.")],
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to write; else RUN/export.")] = None,
    dynamic: Annotated[bool, typer.Option("--dynamic", help="With int8: quantize activations as well.")] = False,
    step: Annotated[
        str | None,
        typer.Option(metavar="N|best|last", help="Which checkpoint; else the best one where the job keeps it."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Evaluate at most so many samples; 0: none.")
    ] = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's weights for use without Meshwright, and show what that does to size and metrics."""
    from meshwright.export.export import export as write
    from meshwright.export.show import lines

    exported = write(run, to, output, dynamic, step, limit, settings or [])
    if as_json:
        print(json.dumps(exported.to_dict()), flush=True)
        return
    for line in lines(exported):
        print(line, flush=True)


@app.command()
def doctor(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure every class of operators and write the device's file.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where --calibrate writes; else the user's cache.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show this machine's devices and links as measured, and what stands in the way of training."""
    from meshwright.cluster.doctor import examine, examine_thoroughly, lines

    if output and not calibrate:
        raise InputError(f"--output {output}: only --calibrate writes a file")
    told = examine_thoroughly(output) if calibrate else examine()
    if as_json:
        print(json.dumps(told), flush=True)
        return
    for line in lines(told):
        print(line, flush=True)


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    rows = {}
    for name, value in result["metrics"].items():
        rows[f"test {name}"] = f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
    if result["samples_per_s"]:
        rows["samples/s"] = f"{result['samples_per_s']:,.0f}"
    if result["measured_step_s"] and result["predicted_step_s"]:
        rows["step"] = f"{result['measured_step_s']:.3g} s, predicted {result['predicted_step_s']:.3g} s"
    rows["steps"] = str(result["steps"])
    if result["restarts"]:
        rows["restarts"] = str(result["restarts"])
    rows["run"] = result["run"]
    width = max(map(len, rows))
    for name, text in rows.items():  # not a rich table, which would cut a long path and read [..] in it as markup
        print(f"{name:<{width}}  {text}", flush=True)


def main() -> None:
    try:
        app(standalone_mode=True)
    except MeshwrightError as error:
        sys.stdout.flush()
        print(f"meshwright: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)


if __name__ == "__main__":
    main()

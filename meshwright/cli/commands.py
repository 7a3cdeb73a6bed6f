"""The command line: reads arguments, calls the rooms, prints. Exit 0 done, 2 the input is wrong, 3 a proof
failed, 1 anything else."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.cli.bench import bench
from meshwright.cli.choice import asked_of, by_dimension, chosen_plan, note_on
from meshwright.cli.data import data
from meshwright.cli.options import AsJson, ClusterName, JobFile, PlanFile, Settings
from meshwright.errors import InputError, MeshwrightError

app = typer.Typer(
    help="Plan, prove and run distributed training of any PyTorch model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(bench, name="bench")
app.add_typer(data, name="data")


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

        chosen, predicted_s = chosen_plan(read, found, given)
        result = run(read, chosen, found, resume, predicted_s, record, note_on(chosen, found, given))
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
    from dataclasses import replace
    from functools import partial
    from time import perf_counter

    from rich.console import Console

    from meshwright.calibrate.probe import measure
    from meshwright.cluster.detect import find
    from meshwright.job import load_job, load_plan
    from meshwright.parallel.check import checker
    from meshwright.planner.answer import answer, of_one, show
    from meshwright.planner.question import with_own_operators
    from meshwright.planner.search import search

    if html:
        raise InputError(f"--html {html}: pages are not written yet, use --json")
    begun = perf_counter()
    read = load_job(job, settings or [])
    given = load_plan(plan) if plan else None
    on = find(cluster or read.cluster, measure)
    if given is None and read.data.partition == "dimension":  # which says how the model is to be divided
        given = by_dimension(read, on.devices)
    asked, profiles = asked_of(read, on, exact=exact, top=top, say=partial(print, file=sys.stderr))
    asked = replace(asked, refuses=checker(profiles.model, profiles.sample, profiles.target))
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
        chosen = chosen_plan(read, find(read.cluster), given)[0] if given == "auto" else given
        proof = run(read, chosen, ranks=ranks, steps=steps, dtype=dtype, dropout=dropout)
        file = save(proof, Path(read.output), read.name)
    if as_json:
        print(json.dumps({**proof.to_dict(), "file": str(file)}), flush=True)
    else:
        show(proof, Console(width=None if sys.stdout.isatty() else 200))
        print(f"saved in {file}", flush=True)
    raise typer.Exit(proof.exit_code)


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
    from meshwright.calibrate.doctor import examine, examine_thoroughly, lines

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
    from meshwright.launch import environment
    from meshwright.launch.ending import finishing

    try:
        with finishing() if environment.read().launched else nullcontext():
            app(standalone_mode=True)
    except MeshwrightError as error:
        sys.stdout.flush()
        print(f"meshwright: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        os._exit(130)

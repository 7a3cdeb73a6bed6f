"""The command line: reads arguments, calls the rooms, prints. Exit 0 done, 2 the input is wrong, 1 anything else."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import InputError, MeshwrightError

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
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job on this machine's devices, or as a rank where torchrun started this command."""
    from meshwright.cluster.detect import find
    from meshwright.job import load_job, load_plan
    from meshwright.launch.world import is_launched
    from meshwright.planner.search import best_plan

    read = load_job(job, settings or [])
    found = find(cluster or read.cluster)
    given = load_plan(plan) if plan else read.plan
    if is_launched():
        from meshwright.train.joined import train_joined

        result = train_joined(read, None if given == "auto" else given, found, resume)
    else:
        from meshwright.train.run import train as run

        chosen = best_plan(found.devices, read.train.global_batch) if given == "auto" else given
        result = run(read, chosen, found, resume)
    if result is not None:
        _print_result(result, as_json)


@bench.command()
def strategies(
    job: JobFile,
    cluster: ClusterName = None,
    steps: Annotated[int, typer.Option(min=2, help="Steps of one measurement.")] = 30,
    rounds: Annotated[int, typer.Option(min=1, help="Alternating rounds; medians are reported.")] = 5,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Train a job in several ways, beside a bare PyTorch loop."""
    from dataclasses import asdict

    from meshwright.bench.strategies import compare
    from meshwright.cluster.detect import find
    from meshwright.job import load_job

    read = load_job(job, settings or [])
    rows = compare(read, find(cluster or read.cluster), steps, rounds)
    summary = {row.strategy: round(row.ratio, 4) for row in rows}
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "summary": summary}), flush=True)
        return
    for row in rows:
        rate = f"{row.samples_per_s:10,.0f} samples/s  ratio {row.ratio:.3f}"
        print(f"{row.strategy:20} {row.ranks} rank(s) {rate}  spread {row.spread:.1%} over {row.rounds} rounds")


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

"""The command line: reads arguments, calls the rooms, prints. Exit 0 done, 2 the input is wrong, 1 anything else."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.errors import MeshwrightError

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
    str | None, typer.Option("--cluster", metavar="C", help="local, or 3xcpu for three ranks on these cores.")
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


def _print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result), flush=True)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None)
    for name, value in result["metrics"].items():
        table.add_row(f"test {name}", f"{value:.2%}" if name == "accuracy" else f"{value:.4f}")
    if result["samples_per_s"]:
        table.add_row("samples/s", f"{result['samples_per_s']:,.0f}")
    table.add_row("steps", str(result["steps"]))
    if result["restarts"]:
        table.add_row("restarts", str(result["restarts"]))
    table.add_row("run", result["run"])
    Console(soft_wrap=True).print(table)


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

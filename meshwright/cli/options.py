"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer

from meshwright.files.user_path import user_path


def path_argument(metavar: str, help: str) -> Any:
    """Returns typer's description of an argument that is a path, in which `~` is replaced."""
    return typer.Argument(metavar=metavar, help=help, parser=lambda text: user_path(text, metavar))


def path_option(name: str, metavar: str, help: str) -> Any:
    """Returns typer's description of an option that is a path, in which `~` is replaced."""
    return typer.Option(name, metavar=metavar, help=help, parser=lambda text: user_path(text, name))


JobFile = Annotated[Path, path_argument("JOB", "The job's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field of the job; may be repeated."),
]
PlanFile = Annotated[Path | None, path_option("--plan", "FILE", "Train with this plan.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="C", help="local (this machine), 3xcpu, 8xH100, or a YAML file; by default the job's."
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Execute what the job.yaml of a run that you did not write imports."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]

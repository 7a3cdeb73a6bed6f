"""Arguments that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

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

"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(metavar="JOB", help="The job's YAML file.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field of the job; may be repeated."),
]
PlanFile = Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="Train with this plan.")]
ClusterName = Annotated[
    str | None, typer.Option("--cluster", metavar="C", help="The cluster: local, 3xcpu, 8xH100, or a YAML file.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]

"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from meshwright.cli.ready_jobs import complete_job, find_job
from meshwright.errors import InputError
from meshwright.files.user_path import user_path
from meshwright.numbers.limits import LARGEST_COUNT
from meshwright.report.plotly_script import check_plotly


class OptionsOnce(TyperCommand):
    """A command that refuses an option with a value which is there twice, instead of taking the last one. Options that
    may be repeated are lists."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(args=list(args))
        for number, option in enumerate(order):
            is_single = isinstance(option, TyperOption) and not option.multiple and not option.is_flag
            if is_single and option in order[:number]:
                raise InputError(f"{option.opts[0]} is there twice: leave out one")
        return super().parse_args(ctx, args)


def path_argument(metavar: str, help: str) -> Any:
    """Returns typer's description of an argument that is a path, in which `~` is replaced."""
    return typer.Argument(metavar=metavar, help=help, parser=lambda text: user_path(text, metavar))


def path_option(name: str, metavar: str, help: str) -> Any:
    """Returns typer's description of an option that is a path, in which `~` is replaced."""
    return typer.Option(name, metavar=metavar, help=help, parser=lambda text: user_path(text, name))


def check_output(file: Path, option: str = "--output") -> None:
    """Raises an `InputError` if the file of an option cannot be written because of its folder, before the command does
    its work."""
    if file.is_dir():
        raise InputError(f"{option} {file}: this is a folder: write the name of a file")
    if not file.parent.is_dir():
        raise InputError(f"{option} {file}: there is no folder {file.parent}: create it first")


def check_page(file: Path) -> None:
    """Raises an `InputError` if the page of `--html` cannot be written, before the command does its work."""
    check_output(file, "--html")
    check_plotly()


def check_not_empty(text: str | None, option: str) -> str | None:
    """Returns the value of an option. Raises an `InputError` if it is there, but empty, as a variable of a script can
    be that was not set."""
    if text is not None and not text.strip():
        raise InputError(f"{option} is empty: write a value, or leave {option} out")
    return text


def job_argument() -> Any:
    """Returns typer's description of an argument that is a job: a path, or the name of a ready job."""
    return typer.Argument(
        metavar="JOB",
        help="The job's YAML file, or the name of a ready job (`meshwright jobs` lists them).",
        parser=find_job,
        autocompletion=complete_job,
    )


JobFile = Annotated[Path, job_argument()]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field of the job; may be repeated."),
]
PlanFile = Annotated[Path | None, path_option("--plan", "FILE", "Train with this plan.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="C",
        help="local (this machine), 3xcpu, 8xH100, or a YAML file; by default the job's.",
        callback=lambda text: check_not_empty(text, "--cluster"),
    ),
]
Trust = Annotated[
    bool,
    typer.Option("--trust", help="Execute what the job.yaml of a run that you did not write imports."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of stdout.")]
GlobalBatch = Annotated[
    int | None,
    typer.Option(
        "--global-batch",
        min=1,
        max=LARGEST_COUNT,
        metavar="N",
        help="For a model: the samples of a step; by default 256.",
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        min=1,
        max=LARGEST_COUNT,
        metavar="N",
        help="For a model: the tokens of a sample; by default the longest that it takes.",
    ),
]
ImageSize = Annotated[
    int | None,
    typer.Option(
        "--image", min=1, max=LARGEST_COUNT, metavar="N", help="For a model: the width and height of a picture."
    ),
]

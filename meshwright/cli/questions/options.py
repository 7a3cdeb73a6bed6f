"""The options of `meshwright plan` that constrain plans, and those that ask questions about them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.errors import InputError
from meshwright.limits import LARGEST_COUNT

if TYPE_CHECKING:
    from meshwright.plan_fields.constraints import Constraints

Fix = Annotated[
    list[str] | None,
    typer.Option("--fix", metavar="FIELD=VALUE", help="Only plans with this value of a field; may be repeated."),
]
Avoid = Annotated[
    list[str] | None,
    typer.Option(
        "--avoid",
        metavar="AXIS|FEATURE",
        help="No plans with this axis (pipeline), feature (recompute) or value (FIELD=VALUE); may be repeated.",
    ),
]
MaxMemory = Annotated[
    str | None,
    typer.Option("--max-memory", metavar="SIZE", help="What a plan may use of one device: 40GB or 40GiB."),
]
Precision = Annotated[
    str | None,
    typer.Option("--precision", metavar="DTYPE", help="Only plans in this precision: --fix numerics.precision=DTYPE."),
]
Batch = Annotated[
    str | None,
    typer.Option("--batch", metavar="max", help="max: the largest batch that fits under each plan, and its speed."),
]
Sweep = Annotated[
    str | None,
    typer.Option(
        "--sweep",
        metavar="WHAT=VALUES",
        help="The best plan for each of several devices, nodes, link, gpu, batch or sequence: devices=8..1024,"
        " link=200G,400G.",
    ),
]
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if", metavar="CHANGE", help="With --sweep: also with link=2x, within=2x, compute=2x or memory=141GB."
    ),
]
For = Annotated[
    str | None,
    typer.Option("--for", metavar="time|cost|devices", help="Which of --clusters is fastest, cheapest or smallest."),
]
Deadline = Annotated[
    str | None, typer.Option("--deadline", metavar="TIME", help="With --for: the run may take 3d, 12h or 90min.")
]
Budget = Annotated[
    float | None, typer.Option("--budget", min=0, metavar="N", help="With --for: what the run may cost.")
]
Epochs = Annotated[
    int | None,
    typer.Option(
        "--epochs", min=1, max=LARGEST_COUNT, metavar="N", help="With --for: how long to train; by default the job's."
    ),
]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--clusters",
        metavar="LIST|FILE",
        help="With --for: clusters and prices of an hour, 8xH100=24,2x8xH100=48, or a YAML file of them.",
    ),
]
Price = Annotated[
    float | None,
    typer.Option("--price", min=0, metavar="N", help="With --sweep: the price of a device and hour, for costs."),
]
ExplainPlans = Annotated[
    tuple[Path, Path] | None,
    typer.Option("--explain", metavar="FILE_A FILE_B", help="Why one of two plans is faster, term by term."),
]
_OF_PLAN = "plan."


def plan_settings(settings: list[str]) -> tuple[list[str], list[str]]:
    """Divides the values of `--set` into those of the job and those of fields of the plan, which are constraints."""
    for setting in settings:
        name, _, value = setting.partition("=")
        if name == "plan" and value != "auto":
            raise InputError(
                f"--set {setting}: this command searches for a plan: predict one with --plan FILE, or fix fields of it"
                " with --fix axes.tensor=4"
            )
    fields = [setting.removeprefix(_OF_PLAN) for setting in settings if setting.startswith(_OF_PLAN)]
    return [setting for setting in settings if not setting.startswith(_OF_PLAN)], fields


def read_constraints(fix: list[str], avoid: list[str], max_memory: str | None, precision: str | None) -> "Constraints":
    """The constraints of the command line."""
    from meshwright.plan_fields.constraints import constraints_from_words

    return constraints_from_words(fix, avoid, max_memory, precision)

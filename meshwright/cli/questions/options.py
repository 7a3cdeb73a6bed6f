"""The options of `meshwright plan` and `meshwright ask` that constrain plans, and those of questions about them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from meshwright.errors import InputError
from meshwright.numbers.limits import LARGEST_COUNT

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
WhatIf = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if", metavar="CHANGE", help="Also with link=2x, within=2x, compute=2x or memory=141GB; may be repeated."
    ),
]
Deadline = Annotated[str | None, typer.Option("--deadline", metavar="TIME", help="The run may take 3d, 12h or 90min.")]
Budget = Annotated[float | None, typer.Option("--budget", min=0, metavar="N", help="What the run may cost.")]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", min=1, max=LARGEST_COUNT, metavar="N", help="How long to train; by default the job's."),
]
Tokens = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="How long to train, in tokens: 1B, 1.5T, 300M.")
]
Samples = Annotated[str | None, typer.Option("--samples", metavar="N", help="How long to train, in samples: 10M.")]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--clusters",
        metavar="LIST|FILE",
        help="Clusters to choose from, with prices of an hour: 8xH100=24,2x8xH100=48, or a YAML file of them.",
    ),
]
Price = Annotated[
    float | None, typer.Option("--price", min=0, metavar="N", help="The price of a device and hour, for costs.")
]


def _moved(name: str, kind: Any, **options: Any) -> Any:
    """The type of an option of `meshwright plan` that has become a command of `meshwright ask`. It is not in the
    help."""
    return Annotated[kind, typer.Option(name, hidden=True, **options)]


MovedBatch = _moved("--batch", str | None)
MovedSweep = _moved("--sweep", str | None)
MovedWhatIf = _moved("--what-if", list[str] | None)
MovedFor = _moved("--for", str | None)
MovedDeadline = _moved("--deadline", str | None)
MovedBudget = _moved("--budget", float | None, min=0)
MovedEpochs = _moved("--epochs", int | None, min=1, max=LARGEST_COUNT)
MovedTokens = _moved("--tokens", str | None)
MovedSamples = _moved("--samples", str | None)
MovedClusters = _moved("--clusters", str | None)
MovedPrice = _moved("--price", float | None, min=0)
MovedExplain = _moved("--explain", tuple[Path, Path] | None)
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

"""The options of `meshwright plan` that constrain plans."""

from typing import TYPE_CHECKING, Annotated

import typer

from meshwright.errors import InputError

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

"""`meshwright horovodrun`: runs Horovod scripts as they are."""

from typing import Annotated

import typer


def horovodrun(
    arguments: Annotated[
        list[str], typer.Argument(metavar="-np N SCRIPT …", help="Options of horovodrun, the script and its arguments.")
    ],
) -> None:
    """Run a Horovod script as it is, on N ranks of this machine (docs/horovod.md)."""
    from meshwright.compat.horovod.launcher.command import launch

    launch(arguments)
